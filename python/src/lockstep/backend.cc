// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "lockstep/collective/c10d/backend.h"
#include "lockstep/collective/meet/rendezvous.h"

namespace lockstep::python {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Blocks until all ranks are connected. Has torch's own return type: Python sees it as a torch.distributed Backend.
c10::intrusive_ptr<c10d::Backend> create_backend(const StorePtr& store, int rank, int size,
                                                 std::chrono::milliseconds timeout) {
  return c10::make_intrusive<C10dBackend>(store, rank, size, timeout);
}

// The store at which the ranks of a launcher meet, this rank, and how many there are. Blocks until rank 0 answers; rank 0 until
// all have come.
std::tuple<StorePtr, int, int> meet_launched_ranks(std::chrono::milliseconds timeout) {
  const JobEnvironment job = read_job_environment();
  return {connect_process_group(job, timeout), job.rank, job.world_size};
}

}  // namespace

void bind_backend(py::module_& module) {
  module.def("create_backend", &create_backend, Release());
  module.def("meet_launched_ranks", &meet_launched_ranks, Release());
}

}  // namespace lockstep::python
