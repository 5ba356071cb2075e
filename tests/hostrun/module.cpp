// The CUDA kernels as functions over numpy arrays. Every array is C-contiguous; results are written
// in place; 16-bit floats are uint16 arrays of their bits. Keyword arguments are the fields of the
// structs in bindings.h, None for a null pointer.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "bindings.h"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

dim3 to_dim3(const std::array<unsigned, 3>& d) {
  return dim3(d[0], d[1], d[2]);
}

// Takes keyword arguments one by one; what is left over at the end was misspelt.
class Arguments {
 public:
  explicit Arguments(py::kwargs given) : given_(std::move(given)) {}

  template <typename T>
  void take(const char* name, T& field) {
    if constexpr (std::is_pointer_v<T>) {
      field = static_cast<T>(const_cast<void*>(pointer(name, sizeof_pointee<T>())));
    } else {
      field = given_.attr("pop")(name).template cast<T>();
    }
  }

  void finish() const {
    if (!given_.empty()) throw py::key_error("unknown: " + std::string(py::str(given_)));
  }

 private:
  template <typename T>
  static constexpr size_t sizeof_pointee() {
    using pointee = std::remove_pointer_t<T>;
    if constexpr (std::is_void_v<pointee>)
      return 0;
    else
      return sizeof(pointee);
  }

  const void* pointer(const char* name, size_t itemsize) {
    const py::object value = given_.attr("pop")(name, py::none());
    if (value.is_none()) return nullptr;
    const auto array = py::cast<py::array>(value);
    if (!(array.flags() & py::array::c_style))
      throw py::value_error(std::string(name) + " must be C-contiguous");
    if (itemsize && size_t(array.itemsize()) != itemsize)
      throw py::type_error(std::string(name) + " has the wrong dtype");
    return array.data();
  }

  py::kwargs given_;
};

BatchNorm batch_norm_call(const py::kwargs& kwargs) {
  Arguments a(py::kwargs(kwargs.attr("copy")()));
  BatchNorm c;
  a.take("dtype", c.dtype);
  a.take("T", c.T), a.take("N", c.N), a.take("C", c.C), a.take("S", c.S), a.take("B", c.B);
  a.take("shared", c.shared), a.take("eps", c.eps), a.take("slope", c.slope);
  a.take("x", c.x), a.take("residual", c.residual), a.take("y", c.y);
  a.take("weight", c.weight), a.take("bias", c.bias);
  a.take("mean", c.mean), a.take("var", c.var), a.take("params", c.params);
  a.take("snapshot", c.snapshot), a.take("seed", c.seed);
  a.take("stream", c.stream), a.take("family", c.family);
  a.take("grad_y", c.grad_y), a.take("grad_x", c.grad_x);
  a.take("grad_residual", c.grad_residual), a.take("sums", c.sums);
  a.finish();
  return c;
}

Predictive predictive_call(const py::kwargs& kwargs) {
  Arguments a(py::kwargs(kwargs.attr("copy")()));
  Predictive c;
  a.take("dtype", c.dtype);
  a.take("T", c.T), a.take("N", c.N), a.take("K", c.K), a.take("S", c.S), a.take("count", c.count);
  a.take("logits", c.logits), a.take("mean", c.mean), a.take("m2", c.m2);
  a.take("expected_entropy", c.expected_entropy), a.take("entropy", c.entropy);
  a.take("grad_mean", c.grad_mean), a.take("grad_variance", c.grad_variance);
  a.take("grad_entropy", c.grad_entropy);
  a.take("grad_expected_entropy", c.grad_expected_entropy);
  a.take("grad_logits", c.grad_logits);
  a.finish();
  return c;
}

Bayes bayes_call(const py::kwargs& kwargs) {
  Arguments a(py::kwargs(kwargs.attr("copy")()));
  Bayes c;
  a.take("kernel", c.kernel), a.take("dtype", c.dtype);
  a.take("T", c.T), a.take("N", c.N), a.take("O", c.O), a.take("I", c.I);
  a.take("first", c.first), a.take("shared", c.shared), a.take("matrix", c.matrix);
  a.take("prior_std", c.prior_std), a.take("pi", c.pi), a.take("std1", c.std1);
  a.take("std2", c.std2), a.take("stream", c.stream), a.take("seed", c.seed);
  a.take("x", c.x), a.take("sigma", c.sigma), a.take("base", c.base), a.take("bias", c.bias);
  a.take("x_scale", c.x_scale), a.take("sigma_scale", c.sigma_scale);
  a.take("grad_scale", c.grad_scale), a.take("mu", c.mu), a.take("rho", c.rho);
  a.take("bias_rho", c.bias_rho), a.take("grad", c.grad), a.take("partial", c.partial);
  a.take("out", c.out), a.take("out2", c.out2), a.take("out3", c.out3), a.take("out4", c.out4);
  a.finish();
  return c;
}

void bind_probes(py::module_& m) {
  m.def(
      "probe",
      [](const std::string& name, const Array<float>& x, Array<float>& y, int64_t n,
         const std::array<unsigned, 3>& grid, const std::array<unsigned, 3>& block, size_t shared) {
        run_probe(name, {to_dim3(grid), to_dim3(block), shared}, x.data(), y.mutable_data(), n);
      },
      py::arg("name"), py::arg("x").noconvert(), py::arg("y").noconvert(), py::arg("n"),
      py::arg("grid") = std::array<unsigned, 3>{1, 1, 1},
      py::arg("block") = std::array<unsigned, 3>{32, 1, 1}, py::arg("shared_bytes") = 0);
  m.def(
      "mma",
      [](bool bfloat16, const Array<uint16_t>& a, const Array<uint16_t>& b, const Array<float>& c,
         Array<float>& d) { run_mma(bfloat16, a.data(), b.data(), c.data(), d.mutable_data()); },
      py::arg("bfloat16"), py::arg("a").noconvert(), py::arg("b").noconvert(),
      py::arg("c").noconvert(), py::arg("d").noconvert());
  m.def(
      "to_half",
      [](const Array<float>& x, Array<uint16_t>& y, bool bfloat16) {
        to_half(x.data(), y.mutable_data(), x.size(), bfloat16);
      },
      py::arg("x").noconvert(), py::arg("y").noconvert(), py::arg("bfloat16"));
  m.def(
      "from_half",
      [](const Array<uint16_t>& x, Array<float>& y, bool bfloat16) {
        from_half(x.data(), y.mutable_data(), x.size(), bfloat16);
      },
      py::arg("x").noconvert(), py::arg("y").noconvert(), py::arg("bfloat16"));
}

void bind_kernels(py::module_& m) {
  m.def(
      "philox_normal",
      [](Array<float>& out, const Array<int64_t>& seed, uint32_t stream, uint32_t tag) {
        if (out.ndim() == 2)
          vector_normal(out.mutable_data(), seed.data(), stream, tag, out.shape(0), out.shape(1));
        else
          weight_normal(
              out.mutable_data(), seed.data(), stream, tag, out.shape(0), out.shape(1),
              out.shape(2));
      },
      py::arg("out").noconvert(), py::arg("seed").noconvert(), py::arg("stream"), py::arg("tag"));
  m.def(
      "snapshot_indices",
      [](Array<int64_t>& out, const Array<int64_t>& seed, int64_t B) {
        snapshot_indices(out.mutable_data(), seed.data(), B, out.size());
      },
      py::arg("out").noconvert(), py::arg("seed").noconvert(), py::arg("B"));
  m.def("batch_norm", [](const py::kwargs& kw) { batch_norm(batch_norm_call(kw)); });
  m.def("batch_norm_backward", [](const py::kwargs& kw) {
    batch_norm_backward(batch_norm_call(kw));
  });
  m.def("bayes", [](const py::kwargs& kw) { bayes(bayes_call(kw)); });
  m.def("predictive", [](const py::kwargs& kw) { predictive(predictive_call(kw)); });
  m.def("predictive_backward", [](const py::kwargs& kw) {
    predictive_backward(predictive_call(kw));
  });
}

}  // namespace

PYBIND11_MODULE(hostrun_module, m) {
  m.def(
      "set_order", &hostrun::set_order, "0: threads in ascending order; else shuffled by the seed");
  m.def("set_last_blocks", &hostrun::set_last_blocks, "0: every block of a grid runs");
  bind_probes(m);
  bind_kernels(m);
}
