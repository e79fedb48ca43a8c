// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <thread>
#include <utility>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/c10d/backend_calls.h"
#include "lockstep/collective/c10d/backend_work.h"
#include "lockstep/collective/shared_memory_transport.h"
#include "lockstep/error.h"

namespace lockstep {

using namespace backend;
using c10d::OpType;
using Tensor = ShmBackend::Tensor;
using WorkPtr = ShmBackend::WorkPtr;

namespace {

void require_one_machine(const std::vector<std::string>& machines, const TransportOptions& options) {
  const std::string& mine = machines[to_size(options.rank)];
  for (std::size_t other = 0; other < machines.size(); ++other)
    if (machines[other] != mine)
      throw RendezvousError({.what = concat("ranks ", options.rank, " and ", other, " run on different machines"),
                             .here = options.describe,
                             .likely = "a job over several machines: the lockstep backend shares memory within one",
                             .next = "use \"gloo\" for this process group"});
}

std::unique_ptr<SharedMemoryTransport> connect_machine(c10d::Store& store, int rank, int size,
                                                       std::chrono::milliseconds timeout) {
  const TransportOptions options{
      .rank = rank, .size = size, .describe = concat("rank ", rank, " of ", size), .timeout = timeout};
  const std::string machine = read_file("/proc/sys/kernel/random/boot_id");
  require_one_machine(exchange_texts(store, "machine", machine, options), options);
  std::vector<int> everyone(to_size(size));
  std::iota(everyone.begin(), everyone.end(), 0);
  return std::make_unique<SharedMemoryTransport>(connect_shared_memory(store, everyone, options));
}

}  // namespace

ShmBackend::ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout)
    : Backend(rank, size), timeout_(timeout), transport_(connect_machine(*store, rank, size, timeout)) {}

ShmBackend::~ShmBackend() {
  if (transport_ != nullptr && !transport_.get_deleter().process.is_here()) return;  // a forked child
  if (std::uncaught_exceptions() > 0) abort();
  try {
    shutdown();
  } catch (const std::exception&) {  // the peers notice, and no one is left here to be told
  }
}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  transport().set_timeout(timeout);
  timeout_ = timeout;
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) return nullptr;
  return c10::make_intrusive<ShmBackend>(store, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()),
                                         options ? options->timeout : timeout_);
}

void ShmBackend::shutdown() {
  if (transport_ == nullptr) return;
  if (transport_->queue().inside()) {
    // Out of a callback, which may hold the last reference to the backend: the callback itself has to end first.
    std::thread([transport = std::move(transport_)] { transport->queue().run_all(); }).detach();
    return;
  }
  transport_->queue().run_all();
  transport_.reset();
}

void ShmBackend::abort() {
  if (transport_ != nullptr) transport_->fail("abort() was called, or an exception left the process group");
}

SharedMemoryTransport& ShmBackend::transport() const {
  if (transport_ != nullptr) return *transport_;
  throw UsageError({.what = "a call on a lockstep backend after its shutdown",
                    .likely = "destroy_process_group() came first",
                    .next = "make the call before, or a new process group"});
}

Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  return transport().allocate({size}, options);
}

template <class CallOptions>
WorkPtr ShmBackend::start(OpType type, std::vector<TensorCall> calls, Tensors results, const CallOptions& options) {
  ++issued_;
  auto work = c10::make_intrusive<CollectiveWork>(rank_, type, std::move(results));
  if (options.timeout != c10d::kUnsetTimeout)
    for (TensorCall& each : calls) each.call.timeout = options.timeout;
  auto task = [&transport = transport(), work, calls = std::move(calls)]() mutable {
    const std::exception_ptr error = failure_of([&] {
      for (const TensorCall& call : calls) {
        call.begin();
        transport.run(call);
        call.finish();
      }
    });
    calls.clear();  // who has waited is the only one to hold the tensors
    work->complete(error);
  };
  CallQueue& queue = transport().queue();
  if (!options.asyncOp) {
    queue.run(task);
    return work;
  }
  queue.add(std::move(task));
  queue.hand_to_worker();
  return work;
}

// ---- Reductions

WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  only_one(tensors, "tensors for all_reduce");
  return start(OpType::ALLREDUCE, {all_reduce_call(tensors.front(), options.reduceOp)}, tensors, options);
}

WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<TensorCall> calls;
  for (const Tensor& tensor : tensors) calls.push_back(all_reduce_call(tensor, options.reduceOp));
  return start(OpType::ALLREDUCE_COALESCED, std::move(calls), tensors, options);
}

WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  only_one(tensors, "tensors for reduce");
  const Call call{.operation = Operation::kReduce, .root = static_cast<int>(options.rootRank)};
  const Tensors outputs = call.root == rank_ ? tensors : Tensors();
  return start(OpType::REDUCE, {call_to_reduce(*this, call, tensors, outputs, options.reduceOp)}, tensors, options);
}

WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ReduceScatterOptions& options) {
  const Tensors& whole = only_one(inputs, "lists of input tensors");
  const Tensor& part = only_one(outputs, "output tensors");
  return start(OpType::REDUCE_SCATTER, {reduce_scatter_call(part, whole, options.reduceOp)}, outputs, options);
}

WorkPtr ShmBackend::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  return start(OpType::_REDUCE_SCATTER_BASE, {reduce_scatter_call(output, {input}, options.reduceOp)}, {output},
               options);
}

WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  check_pairs(outputs, inputs);
  std::vector<TensorCall> calls;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    calls.push_back(reduce_scatter_call(outputs[i], {inputs[i]}, options.reduceOp));
  return start(OpType::COALESCED, std::move(calls), outputs, options);
}

TensorCall ShmBackend::all_reduce_call(const Tensor& tensor, const c10d::ReduceOp& op) const {
  return call_to_reduce(*this, {.operation = Operation::kAllReduce}, {tensor}, {tensor}, op);
}

TensorCall ShmBackend::reduce_scatter_call(const Tensor& part, const Tensors& whole, const c10d::ReduceOp& op) const {
  return call_to_reduce(*this, {.operation = Operation::kReduceScatter}, whole, {part}, op);
}

// ---- Moving data

WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  only_one(tensors, "tensors for broadcast");
  const Call call{.operation = Operation::kBroadcast, .root = static_cast<int>(options.rootRank)};
  return start(OpType::BROADCAST, {call_to_move(*this, call, tensors, tensors)}, tensors, options);
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return start(OpType::BARRIER, {{.call = {.operation = Operation::kBarrier}}}, {}, options);
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) { barrier(options)->wait(); }

WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors& whole = only_one(outputs, "lists of output tensors");
  return start(OpType::ALLGATHER, {all_gather_call(whole, only_one(inputs, "input tensors"))}, whole, options);
}

WorkPtr ShmBackend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  return start(OpType::_ALLGATHER_BASE, {all_gather_call({output}, input)}, {output}, options);
}

// outputs[r][i] is rank r's inputs[i].
WorkPtr ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  for (const Tensors& of_rank : outputs) check_pairs(of_rank, inputs);
  std::vector<TensorCall> calls;
  Tensors results;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors whole;
    for (const Tensors& of_rank : outputs) whole.push_back(of_rank[i]);
    calls.push_back(all_gather_call(whole, inputs[i]));
    results.insert(results.end(), whole.begin(), whole.end());
  }
  return start(OpType::ALLGATHER_COALESCED, std::move(calls), std::move(results), options);
}

WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  check_pairs(outputs, inputs);
  std::vector<TensorCall> calls;
  for (std::size_t i = 0; i < outputs.size(); ++i) calls.push_back(all_gather_call({outputs[i]}, inputs[i]));
  return start(OpType::COALESCED, std::move(calls), outputs, options);
}

TensorCall ShmBackend::all_gather_call(const Tensors& whole, const Tensor& part) const {
  return call_to_move(*this, {.operation = Operation::kAllGather}, {part}, whole);
}

WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  only_one(inputs, "input tensors");
  const Call call{.operation = Operation::kGather, .root = static_cast<int>(options.rootRank)};
  const Tensors whole = call.root == rank_ ? only_one(outputs, "lists of output tensors") : Tensors();
  return start(OpType::GATHER, {call_to_move(*this, call, inputs, whole)}, whole, options);
}

WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  only_one(outputs, "output tensors");
  const Call call{.operation = Operation::kScatter, .root = static_cast<int>(options.rootRank)};
  const Tensors whole = call.root == rank_ ? only_one(inputs, "lists of input tensors") : Tensors();
  return start(OpType::SCATTER, {call_to_move(*this, call, whole, outputs)}, outputs, options);
}

WorkPtr ShmBackend::alltoall_base(Tensor& output, Tensor& input, std::vector<std::int64_t>& output_splits,
                                  std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  const Call call{.operation = Operation::kAllToAll,
                  .counts = counts_of_rows(input, input_splits, size_, "the input"),
                  .receive_counts = counts_of_rows(output, output_splits, size_, "the output")};
  return start(OpType::ALLTOALL_BASE, {call_to_move(*this, call, {input}, {output})}, {output}, options);
}

WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const Call call{.operation = Operation::kAllToAll,
                  .counts = counts_of_tensors(inputs, size_),
                  .receive_counts = counts_of_tensors(outputs, size_)};
  return start(OpType::ALLTOALL, {call_to_move(*this, call, inputs, outputs)}, outputs, options);
}

// ---- Messages

WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) { return start_message(OpType::SEND, tensors, to, tag); }

WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  return start_message(OpType::RECV, tensors, from, tag);
}

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return start_message(OpType::RECVANYSOURCE, tensors, kAnyRank, tag);
}

WorkPtr ShmBackend::start_message(OpType type, Tensors& tensors, int peer, int tag) {
  only_one(tensors, "tensors for a message");
  const bool sends = type == OpType::SEND;
  const Call call{.operation = sends ? Operation::kSend : Operation::kReceive, .peer = peer, .tag = tag};
  const TensorCall message = call_to_move(*this, call, sends ? tensors : Tensors(), sends ? Tensors() : tensors);
  message.begin();
  return c10::make_intrusive<MessageWork>(rank_, type, tensors, message, transport().start(message));
}

}  // namespace lockstep
