// The CUDA kernels as functions over numpy arrays. Every array is C-contiguous and written in
// place; 16-bit floats are uint16 arrays of their bits.
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
  m.def("to_half", [](const Array<float>& x, Array<uint16_t>& y, bool bfloat16) {
    to_half(x.data(), y.mutable_data(), x.size(), bfloat16);
  });
  m.def("from_half", [](const Array<uint16_t>& x, Array<float>& y, bool bfloat16) {
    from_half(x.data(), y.mutable_data(), x.size(), bfloat16);
  });
}

}  // namespace

PYBIND11_MODULE(HOSTRUN_MODULE, m) {
  m.def(
      "set_order", &hostrun::set_order, "0: threads in ascending order; else shuffled by the seed");
  bind_probes(m);
}
