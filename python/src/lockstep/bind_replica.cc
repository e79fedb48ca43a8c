// SPDX-License-Identifier: Apache-2.0

#include "bindings.h"
#include "lockstep/strategy/option_names.h"
#include "replica.h"

namespace lockstep::python {
namespace {

using Options = DistributedDataParallelOptions;

std::shared_ptr<Replica> make(const World& world, const NamedTensors& parameters, const NamedTensors& buffers,
                              const std::shared_ptr<Optimizer>& optimizer, const Options& options,
                              const std::optional<std::string>& weights) {
  if (weights && *weights != "samples")
    throw UsageError(
        {.what = concat("weights='", *weights, "'"), .next = "weights='samples', or None: all ranks count alike"});
  const auto replica =
      std::make_shared<Replica>(world, parameters, buffers, optimizer, options, /*by_samples=*/weights.has_value());
  replica->watch_parameters();
  return replica;
}

py::dict statistics_of(Replica& replica) {
  const auto statistics = replica.ddp().statistics();
  return py::dict(py::arg("exchanges") = statistics.exchanges, py::arg("bytes") = statistics.bytes,
                  py::arg("exchange_seconds") = statistics.exchange_seconds,
                  py::arg("waiting_seconds") = statistics.waiting_seconds);
}

}  // namespace

void bind_replica(py::module_& module) {
  py::class_<Options>(module, "Options")
      .def(py::init())
      .def_readwrite("bucket_bytes", &Options::bucket_bytes)
      .def_readwrite("broadcast_buffers", &Options::broadcast_buffers)
      .def_readwrite("share_parameters", &Options::share_parameters)
      .def_readwrite("mean_in_grad", &Options::mean_in_grad)
      .def_readwrite("find_unused_parameters", &Options::find_unused_parameters)
      .def_readwrite("static_graph", &Options::static_graph)
      .def_readwrite("gradient_as_bucket_view", &Options::gradient_as_bucket_view)
      .def_readwrite("ignored", &Options::ignored)
      .def_readwrite("sparse_parameters", &Options::sparse_parameters)
      .def("set_algorithm",
           [](Options& options, const std::string& name) {
             options.algorithm = value_named<Algorithm>(name, "algorithm");
           })
      .def("set_hook", [](Options& options, const std::string& name, double amount) {
        options.hook = make_hook({.kind = value_named<Compression>(name, "hook"), .amount = amount});
      });
  py::class_<Replica, std::shared_ptr<Replica>>(module, "Replica")
      .def(py::init(&make), Release())
      .def("enter_forward", &Replica::enter_forward)
      .def("leave_forward", &Replica::leave_forward)
      .def("watch", &Replica::watch)
      .def("set_samples", &Replica::set_samples)
      .def("skip_batch", &Replica::skip_batch, Release(), py::arg("joined"))
      .def_property("no_sync", &Replica::no_sync, &Replica::set_no_sync)
      .def_property_readonly("accumulates", &Replica::accumulates)
      .def_property_readonly("mean_in_grad", [](Replica& replica) { return replica.ddp().mean_in_grad(); })
      .def_property_readonly("samples_of_last_batch",
                             [](Replica& replica) { return replica.ddp().last_batch().samples; })
      .def_property_readonly("statistics", &statistics_of)
      .def("write_parameters",
           [](Replica& replica, const py::function& write) {
             const py::gil_scoped_release release;
             replica.ddp().write_parameters([&] {
               const py::gil_scoped_acquire acquire;
               write();
             });
           })
      .def(
          "parameters_written", [](Replica& replica) { replica.ddp().parameters_written(); }, Release());
}

}  // namespace lockstep::python
