// SPDX-License-Identifier: Apache-2.0
// collective/c10d/backend.h: World's transports as a c10d::Backend, so that PyTorch's own DDP, FSDP and functional
// collectives run over them unmodified: shared memory on one machine, the hierarchy over several.
//
// Flow:    c10d::ProcessGroup (C++ or Python) -> here -> backend_calls.h -> collective/transport/connect.h's transport
// Owns:    this rank's connections; a thread for collectives, once one was started without blocking
// Threads: any, like other backends: calls of several threads are ordered by a lock
// Ranks:   every rank makes the same collectives in the same order; send and receive are for the two that are named
//
// Tensors: on the CPU; dense, but all_reduce sums sparse ones (COO), too. A tensor, or list of tensors, that is one
// contiguous piece of memory is exchanged where it lies; anything else through a contiguous copy. Every dtype can be
// moved; lockstep/collective_types.h says what can be reduced, besides complex numbers where their parts may be reduced
// one by one. AVG and PREMUL_SUM are there too.
//
// Every call returns a Work at once. A collective that its caller is going to wait for anyway (asyncOp == false) is
// done by then, on the caller's thread. Work::wait throws what went wrong: MismatchError, PeerLost (see
// shm/group.h; over several machines both end the group). A wait that ends at its own timeout leaves the call going on;
// the `timeout` in a collective's options ends the call itself, as that of the backend does where there is none. The
// backend holds the tensors of every call until it is done, whoever waits.
//
// Callbacks of a collective's future run on the thread that carried it out, or on that which attaches them if it is
// done by then. They may make collectives of this backend and wait for them: those are made there at once, before
// whatever comes next, so that all ranks make them in the same order where a callback is attached before the next
// collective is started (call_queue.h has the reasons). They must not wait for collectives that other threads
// start meanwhile.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/process/own_process.h"
#include "lockstep/collective/meet/store_ptr.h"
#include "lockstep/collective_types.h"
#include "lockstep/deadline.h"

namespace lockstep {

class CpuTransport;
class Transport;
struct TensorCall;
class MessageGroup;

namespace backend {
struct GroupRank;
}
std::string this_machine();  // transport/connect.h

class C10dBackend final : public c10d::Backend {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Blocks until all `size` ranks are connected; the store carries addresses and is not used afterwards. A store, or a
  // prefix of one, serves several backends if all ranks make them in the same order. Ranks with the same `machine` share
  // memory; left out, it is this_machine() of connect.h. Throws RendezvousError: ranks that did not come, machines that
  // can't reach each other; SystemError.
  C10dBackend(const StorePtr& store, int rank, int size, milliseconds timeout, std::string machine = this_machine());

  // As shutdown(); while an exception is on its way, the peers learn that this rank has failed.
  ~C10dBackend() override;

  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(milliseconds timeout) override;  // waits for the calls under way
  void setSequenceNumberForGroup() override {}     // the core numbers and compares every collective itself
  std::uint64_t getSequenceNumberForGroup() override { return issued_; }

  // A backend of its own for some ranks, over its own store; none for the others. They make the call at the same time.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;

  // Waits for the calls under way, then leaves in good order; out of a callback it returns at once, and both follow.
  void shutdown() override;
  void abort() override;  // ends the calls under way, here and on all peers, with PeerLost

  // Tensors from here are read by peers where they lie: their collectives copy nothing. They may outlive the backend.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  Tensor allocateTensor(long size, at::TensorOptions options) override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  // As Gloo's: rank 0 waits for the others, at most for the timeout, and throws PeerLost naming the first rank that did
  // not come, or all of them; then the group has failed and the other ranks get PeerLost.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;

  // Split sizes are rows of the first dimension; empty ones: equal parts.
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;

  // Not ordered with collectives. Their Work has no future, as that of Gloo.
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  backend::GroupRank member() const;
  // The reduction and the root are those of `options`, where it has them.
  template <class CallOptions>
  TensorCall call_of(Operation operation, const Tensors& inputs, const Tensors& outputs,
                     const CallOptions& options) const;

  // Makes the calls one after the other, as one collective of c10d.
  template <class CallOptions>
  WorkPtr start(c10d::OpType type, std::vector<TensorCall> calls, Tensors results, const CallOptions& options);
  template <class CallOptions>
  WorkPtr start_pairs(c10d::OpType type, Operation operation, const Tensors& inputs, const Tensors& outputs,
                      const CallOptions& options);
  using Body = std::function<void(Transport& transport)>;
  WorkPtr start(c10d::OpType type, Body body, Tensors results, bool async);
  WorkPtr start_message(c10d::OpType type, Tensors& tensors, int peer, std::int64_t tag);
  void trace_if_asked(const std::vector<int>& machine_of);
  std::shared_ptr<MessageGroup> exchange_numbers() const;
  CpuTransport& transport() const;  // throws UsageError after shutdown()

  milliseconds timeout_;
  std::string machine_;
  std::atomic<std::uint64_t> issued_{0};
  OwnedHere<CpuTransport> transport_;  // none after shutdown()
  std::shared_ptr<MessageGroup> messages_;
};

}  // namespace lockstep
