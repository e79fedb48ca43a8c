// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoints.h"

#include "bindings.h"

namespace lockstep::python {

void bind_checkpoints(py::module_& module) {
  // python/src/lockstep/checkpoints.py says what they do.
  py::class_<Checkpoints>(module, "Checkpoints")
      .def(py::init<const std::filesystem::path&, std::optional<std::int64_t>>(), Release())
      .def("newest", &Checkpoints::newest, Release())
      .def(
          "save",
          [](Checkpoints& self, std::int64_t step, std::map<std::string, torch::Tensor> tensors,
             std::map<std::string, std::string> metadata) {
            self.save(step, {.tensors = std::move(tensors), .metadata = std::move(metadata)});
          },
          Release())
      .def("finish", &Checkpoints::finish, Release());
}

}  // namespace lockstep::python
