// SPDX-License-Identifier: Apache-2.0
#include "agent/recover/job_memory.h"

#include "bindings.h"
#include "lockstep/checkpoints.h"
#include "lockstep/train/state/loop_state.h"

namespace lockstep::python {
namespace {

using TensorsByName = std::map<std::string, torch::Tensor>;

// The tensors are the kept memory itself: to be copied, and not written to.
TensorsByName tensors_of(const SafetensorsReader& image) {
  TensorsByName tensors;
  for (const auto& [name, entry] : image.entries()) tensors[name] = image.read(name);
  return tensors;
}

// None where no launcher replaces ranks. Blocks.
std::unique_ptr<LoopState> loop_state_of(const World& world, double share_of_time) {
  JobMemory* const memory = JobMemory::get();
  return memory == nullptr ? nullptr : std::make_unique<LoopState>(world, *memory, share_of_time);
}

// Blocks until a replacement is there; false: the job ends. Interruptible by Ctrl-C after this long.
bool next_generation(std::chrono::milliseconds timeout) {
  JobMemory* const memory = JobMemory::get();
  return memory != nullptr && memory->next_generation(timeout);
}

}  // namespace

void bind_recovery(py::module_& module) {
  // python/src/lockstep/checkpoints.py says what they do.
  py::class_<Checkpoints>(module, "Checkpoints")
      .def(py::init<const std::filesystem::path&, std::optional<int64_t>>(), Release())
      .def("newest", &Checkpoints::newest, Release())
      .def(
          "save",
          [](Checkpoints& self, int64_t step, std::map<std::string, torch::Tensor> tensors,
             std::map<std::string, std::string> metadata) {
            self.save(step, {.tensors = std::move(tensors), .metadata = std::move(metadata)});
          },
          Release())
      .def("finish", &Checkpoints::finish, Release());
  py::class_<LoopState::Found>(module, "FoundState")
      .def_readonly("is_own_rank", &LoopState::Found::is_own_rank)
      .def_readonly("ranks", &LoopState::Found::ranks)
      .def_property_readonly("common", [](const LoopState::Found& found) { return tensors_of(found.common); })
      .def_property_readonly("own", [](const LoopState::Found& found) { return tensors_of(found.own); });
  py::class_<LoopState>(module, "LoopState")
      .def_property_readonly("found", &LoopState::found, py::return_value_policy::reference_internal)
      .def_property_readonly("keeps_common", &LoopState::keeps_common)
      .def("taken", &LoopState::taken, Release())
      .def("is_due", &LoopState::is_due)
      .def(
          "keep",
          [](LoopState& self, int64_t step, TensorsByName common, TensorsByName own) {
            self.keep(step, {.tensors = std::move(common), .metadata = {}},
                      {.tensors = std::move(own), .metadata = {}});
          },
          Release());
  module.def("loop_state_of", &loop_state_of, Release());
  module.def("next_generation", &next_generation, Release());
  module.def("replaces_ranks", [] { return JobMemory::get() != nullptr; });
}

}  // namespace lockstep::python
