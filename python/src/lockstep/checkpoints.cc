// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoints.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "bindings.h"

namespace py = pybind11;

namespace lockstep::python {

void bind_checkpoints(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Checkpoints>(module, "Checkpoints", R"(The newest checkpoints of a loop, written while it goes on.

Checkpoints(folder): makes the folder; a file .lock keeps a second writer out. One rank of a job has one, usually rank 0. Raises
CheckpointError: the folder can't be written, or another process writes there.)")
      .def(py::init<const std::filesystem::path&>(), Release(), py::arg("folder"))
      .def("newest", &Checkpoints::newest, Release(), R"(newest() -> pathlib.Path | None

The newest checkpoint that is whole, a file of safetensors; None if there is none. Raises CheckpointError: all are damaged.)")
      .def(
          "save",
          [](Checkpoints& self, std::int64_t step, std::map<std::string, torch::Tensor> tensors,
             std::map<std::string, std::string> metadata) {
            self.save(step, {.tensors = std::move(tensors), .metadata = std::move(metadata)});
          },
          Release(), py::arg("step"), py::arg("tensors"), py::arg("metadata") = std::map<std::string, std::string>(),
          R"(save(step: int, tensors: dict[str, Tensor], metadata: dict[str, str] = {}) -> None

Blocks for a copy of the tensors (CPU or GPU, any layout); if the last save is still being written, first for that, at most ten
seconds. The two newest are kept. A disk that is full or does not answer is a warning, and the next save tries again.)")
      .def("finish", &Checkpoints::finish, Release(), py::arg("step"),
           py::arg("timeout") = std::chrono::milliseconds(300'000),
           R"(finish(step: int, timeout: timedelta = 5 minutes) -> None

Blocks until nothing is being written. Raises CheckpointError: the newest on the disk is not that of `step`; or the timeout.)");
}

}  // namespace lockstep::python
