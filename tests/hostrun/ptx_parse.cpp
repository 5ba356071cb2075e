#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <stdexcept>

#include "ptx.h"

namespace hostrun::ptx {
namespace {

[[noreturn]] void fail(int line, const std::string& what) {
  throw std::runtime_error("ptx: line " + std::to_string(line) + ": " + what);
}

std::string trimmed(const std::string& s) {
  const size_t from = s.find_first_not_of(" \t\r"), to = s.find_last_not_of(" \t\r");
  return from == std::string::npos ? "" : s.substr(from, to - from + 1);
}

size_t rounded_up(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

bool starts_with(const std::string& s, const char* start) {
  return s.rfind(start, 0) == 0;
}

struct SharedArray {
  size_t bytes, alignment;
};

// ".shared .align 4 .b8 name[128]" and the like: its name and what it takes; 0 bytes of an unsized one.
std::pair<std::string, SharedArray> shared_array(const std::string& s) {
  const size_t align = s.find(".align"), open = s.find('['), close = s.find(']');
  const size_t name = s.find_last_of(" \t", open) + 1;
  const size_t bytes = open == std::string::npos ? 0 : std::strtoull(&s[open + 1], nullptr, 10);
  const size_t end = std::min({open, close, s.size()});
  const size_t alignment =
      align == std::string::npos ? 16 : std::strtoull(&s[align + 6], nullptr, 10);
  return {trimmed(s.substr(name, end - name)), {bytes, alignment}};
}

// What one kernel's statements refer to, and the statements as they come.
class Body {
 public:
  Body(Kernel& kernel, const std::map<std::string, SharedArray>& module)
      : kernel_(kernel), arrays_(module) {}

  void declare_array(const std::string& statement) { arrays_.insert(shared_array(statement)); }

  // ".reg .b32 %r<200>", which stands for %r0 to %r199, or ".reg .b32 %temp".
  void declare_registers(const std::string& statement) {
    const size_t name = statement.find('%'), many = statement.find('<');
    declared_.insert(statement.substr(name, many == std::string::npos ? many : many + 1 - name));
  }

  void label(const std::string& name, int line) {
    if (!labels_.insert({name, uint32_t(kernel_.code.size())}).second)
      fail(line, "label " + name + " for the second time");
  }
  void param(const std::string& name, size_t offset) { params_[name] = offset; }

  void statement(const std::string& text, int line) {
    Instruction i;
    i.line = line;
    std::istringstream words(text);
    std::string name;
    words >> name;
    if (name[0] == '@') {
      i.guarded = true;
      i.negated = name[1] == '!';
      i.predicate = reg(name.substr(i.negated ? 2 : 1), line);
      words >> name;
    }
    std::string rest;
    std::getline(words, rest);
    complete(i, name, trimmed(rest));
    kernel_.code.push_back(i);
  }

  void finish() {
    for (const auto& [at, label] : jumps_) {
      if (!labels_.count(label)) fail(kernel_.code[at].line, "no label " + label);
      kernel_.code[at].target = labels_[label];
    }
    Instruction end;
    end.flow = Flow::kReturn;
    kernel_.code.push_back(end);
    kernel_.executed.assign(kernel_.code.size(), 0);
    place_unsized();
  }

 private:
  void complete(Instruction& i, const std::string& name, const std::string& rest) {
    if (name == "bra" || name == "bra.uni") {
      i.flow = Flow::kBranch;
      jumps_.push_back({kernel_.code.size(), rest});
    } else if (name == "ret" || name == "exit") {
      i.flow = Flow::kReturn;
    } else if (name == "bar.sync" || name == "barrier.sync") {
      if (rest != "0") fail(i.line, "only barrier 0 is known here, got " + rest);
      i.flow = Flow::kBarrier;
    } else {
      // mov with braces joins or parts registers.
      const bool joins = starts_with(name, "mov.") && rest.find('{') != std::string::npos;
      const bool parts = joins && rest[0] == '{';
      const auto found = find_operation(joins ? (parts ? "part" : "join") + name.substr(3) : name);
      if (!found.execute) fail(i.line, "unknown instruction " + name);
      i.execute = found.execute;
      const int count = operands(i, rest);
      if (count != found.operands)
        fail(
            i.line, name + " has " + std::to_string(found.operands) + " operands, not " +
                        std::to_string(count));
    }
  }

  // How many there are.
  int operands(Instruction& i, const std::string& text) {
    int count = 0;
    std::string word;
    bool address = false;
    const auto take = [&] {
      word = trimmed(word);
      if (word.empty()) return;
      if (count == kOperands) fail(i.line, "too many operands");
      if (address && i.offset) fail(i.line, "an offset of other than the last address");
      i.operands[count++] = address ? base(i, word) : value(word, i.line);
      word.clear();
    };
    for (const char c : text) {
      if (std::strchr(",{}|[]", c)) take();
      if (c == '[' || c == ']') address = c == '[';
      if (!std::strchr(",{}|[]", c)) word += c;
    }
    take();
    return count;
  }

  int base(Instruction& i, const std::string& word) {
    const size_t plus = word.find('+');
    if (plus != std::string::npos) i.offset = std::strtoll(&word[plus + 1], nullptr, 0);
    return value(trimmed(word.substr(0, plus)), i.line);
  }

  int value(const std::string& word, int line) {
    if (word[0] == '%') return reg(word, line);
    if (word[0] == '-' || std::isdigit(word[0])) return constant(number(word));
    if (params_.count(word)) return constant(params_.at(word));
    if (!arrays_.count(word)) fail(line, "unknown name " + word);
    return symbol(word);
  }

  static uint64_t number(const std::string& word) {
    if (starts_with(word, "0f") || starts_with(word, "0d"))
      return std::strtoull(&word[2], nullptr, 16);
    if (word[0] == '-') return uint64_t(std::strtoll(word.c_str(), nullptr, 0));
    return std::strtoull(word.c_str(), nullptr, 0);
  }

  int reg(const std::string& name, int line) {
    const std::string family = name.substr(0, name.find_last_not_of("0123456789") + 1);
    if (!declared_.count(name) && !declared_.count(family + "<") && !is_special(name))
      fail(line, "unknown register " + name);
    const int next = int(kernel_.registers.size());
    return kernel_.registers.insert({name, next}).first->second;
  }

  int constant(uint64_t v) {
    const int index = int(kernel_.constants.size() / kLanes);
    kernel_.constants.insert(kernel_.constants.end(), kLanes, v);
    return -1 - index;
  }

  // The address of an array, which an unsized one gets behind all others.
  int symbol(const std::string& name) {
    const SharedArray& array = arrays_.at(name);
    if (array.bytes == 0) {
      unsized_.push_back(constant(0));
      return unsized_.back();
    }
    if (!placed_.count(name)) {
      placed_[name] = rounded_up(kernel_.shared_bytes, array.alignment);
      kernel_.shared_bytes = placed_[name] + array.bytes;
    }
    return constant(placed_[name]);
  }

  void place_unsized() {
    if (unsized_.empty()) return;
    kernel_.shared_bytes = rounded_up(kernel_.shared_bytes, 16);
    for (const int operand : unsized_)
      for (int lane = 0; lane < kLanes; ++lane)
        kernel_.constants[size_t(-1 - operand) * kLanes + lane] = kernel_.shared_bytes;
  }

  Kernel& kernel_;
  std::map<std::string, SharedArray> arrays_;
  std::set<std::string> declared_;
  std::map<std::string, size_t> params_, placed_;
  std::map<std::string, uint32_t> labels_;
  std::vector<std::pair<size_t, std::string>> jumps_;
  std::vector<int> unsized_;
};

// ".param .align 8 .b8 name[112]" or ".param .u64 name": the bytes it has and needs to be aligned to.
struct Param {
  std::string name;
  size_t bytes, alignment;
};

Param param(const std::string& s) {
  if (s.find(".align") != std::string::npos) {
    const auto [name, array] = shared_array(s);
    return {name, array.bytes, array.alignment};
  }
  const size_t type = s.find('.', 1), end = s.find(' ', type);
  const size_t bits = std::strtoull(&s[type + 2], nullptr, 10);
  return {trimmed(s.substr(end)), bits / 8, bits / 8};
}

class Parser {
 public:
  std::map<std::string, std::unique_ptr<Kernel>> parse(const std::string& text) {
    std::istringstream lines(text);
    std::string s;
    while (std::getline(lines, s)) {
      ++line_;
      s = trimmed(s.substr(0, s.find("//")));
      if (!s.empty()) body_ ? inside(s) : outside(s);
    }
    if (body_) fail(line_, kernel_->name + " does not end");
    return std::move(kernels_);
  }

 private:
  void outside(std::string s) {
    if (s.find(".shared") != std::string::npos) module_.insert(shared_array(s));
    const size_t entry = s.find(".entry");
    if (entry == std::string::npos) return;
    const size_t open = s.find('(');
    const std::string name = trimmed(s.substr(entry + 6, open - entry - 6));
    auto& kernel = kernels_[name] = std::make_unique<Kernel>();
    kernel_ = kernel.get();
    kernel_->name = name;
    body_ = std::make_unique<Body>(*kernel_, module_);
    depth_ = 0;
  }

  void inside(std::string s) {
    if (depth_ == 0 && starts_with(s, ".param")) return add_param(s);
    if (starts_with(s, ".maxntid")) {
      unsigned x = 1, y = 1, z = 1;
      std::sscanf(s.c_str(), ".maxntid %u, %u, %u", &x, &y, &z);
      kernel_->max_threads = x * y * z;
    }
    if (s[0] == '{') {
      ++depth_;
      s = trimmed(s.substr(1));
    }
    const bool closes = !s.empty() && s.back() == '}';
    if (closes) s = trimmed(s.substr(0, s.size() - 1));
    if (depth_ > 0) statements(s);
    if (closes && --depth_ == 0) {
      body_->finish();
      body_.reset();
    }
  }

  void statements(const std::string& s) {
    std::istringstream parts(s);
    std::string part;
    while (std::getline(parts, part, ';')) {
      part = trimmed(part);
      if (part.empty()) continue;
      if (part.back() == ':')
        body_->label(part.substr(0, part.size() - 1), line_);
      else if (starts_with(part, ".shared"))
        body_->declare_array(part);
      else if (starts_with(part, ".reg"))
        body_->declare_registers(part);
      else if (part[0] != '.')
        body_->statement(part, line_);
    }
  }

  void add_param(const std::string& s) {
    const Param p = param(s.back() == ',' ? s.substr(0, s.size() - 1) : s);
    const size_t offset = rounded_up(kernel_->param_bytes, p.alignment);
    kernel_->param_offset.push_back(offset);
    kernel_->param_bytes = offset + p.bytes;
    body_->param(p.name, offset);
  }

  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
  std::map<std::string, SharedArray> module_;
  Kernel* kernel_ = nullptr;
  std::unique_ptr<Body> body_;
  int line_ = 0, depth_ = 0;
};

}  // namespace

std::map<std::string, std::unique_ptr<Kernel>> parse(const std::string& text) {
  return Parser().parse(text);
}

}  // namespace hostrun::ptx
