// SPDX-License-Identifier: Apache-2.0
#include "lockstep/devices.h"

#include <ATen/ThreadLocalState.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings.h"
#include "lockstep/average_nets.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/error.h"
#include "lockstep/strategy/averaging/flat_block.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep::python {
namespace {

// The threads of devices may need the GIL to end.
struct EndThreads {
  void operator()(Devices* devices) const {
    const py::gil_scoped_release others_run;
    delete devices;
  }
};
using DevicesPtr = std::unique_ptr<Devices, EndThreads>;

DevicesPtr make_devices(int count, const std::string& places, std::chrono::milliseconds timeout) {
  DevicesOptions options{.count = count, .timeout = timeout};
  if (!places.empty()) options.places = parse_device_places(places);
  if (!places.empty()) options.count = static_cast<int>(options.places.size());
  const py::gil_scoped_release others_run;
  return DevicesPtr(new Devices(options));
}

// Calls function(i) on the thread of each device i, under this thread's no_grad() and autocast(), with random numbers
// that torch.manual_seed() decides. What it raises first is raised here.
void run(Devices& devices, const py::function& function) {
  const auto body = held(function);
  const py::gil_scoped_release others_run;
  devices.run([body, here = at::ThreadLocalState(), seed = draw_seed()](Device& device) {
    const at::ThreadLocalStateGuard as_here(here);
    device.seed(mix_seed(seed, device.index()));
    const py::gil_scoped_acquire gil;
    (*body)(device.index());
  });
}

// tensors: a list for each device.
void all_reduce(Devices& devices, const std::vector<std::vector<torch::Tensor>>& tensors,
                const std::string& algorithm) {
  if (std::ssize(tensors) != devices.size())
    throw UsageError({.what = "all_reduce() of another number of tensors than there are devices",
                      .next = "give one tensor for each device, on it"});
  devices.run([tensors, way = value_named<Algorithm>(algorithm, "algorithm")](Device& device) {
    const torch::NoGradGuard no_grad;
    for (const torch::Tensor& tensor : tensors[static_cast<size_t>(device.index())]) device.all_reduce(tensor, way);
  });
}

}  // namespace

void bind_devices(py::module_& module) {
  module.def("flat_blocks", &make_flat_blocks, Release());
  py::class_<Devices, DevicesPtr>(module, "Devices")
      .def(py::init(&make_devices))
      .def_property_readonly("size", &Devices::size)
      .def("where", &Devices::where)
      .def("run", &run)
      .def("all_reduce", &all_reduce, Release())
      .def("average", &average, Release());
}

}  // namespace lockstep::python
