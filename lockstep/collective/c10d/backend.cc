// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/c10d/backend_calls.h"
#include "lockstep/collective/c10d/backend_work.h"
#include "lockstep/collective/calls/call_queue.h"
#include "lockstep/collective/trace_if_asked.h"
#include "lockstep/collective/transport/connect.h"
#include "lockstep/error.h"

namespace lockstep {

using namespace backend;
using c10d::OpType;
using Tensor = C10dBackend::Tensor;
using WorkPtr = C10dBackend::WorkPtr;

C10dBackend::C10dBackend(const StorePtr& store, int rank, int size, milliseconds timeout, std::string machine)
    : Backend(rank, size), timeout_(timeout), machine_(std::move(machine)) {
  const TransportOptions options{
      .rank = rank, .size = size, .describe = concat("rank ", rank, " of ", size), .timeout = timeout};
  CpuConnection connection = connect_cpu_ranks(store, machine_, options);
  transport_ = std::move(connection.transport);
  messages_ = exchange_numbers();
  trace_if_asked(connection.machine_of);
}

// All ranks tell each other what they are in the job: where the launcher has not numbered them, what they are here.
std::shared_ptr<MessageGroup> C10dBackend::exchange_numbers() const {
  const JobEnvironment job = job_environment_or_none();
  const Tensor mine = torch::tensor({job.world_size > 1 ? job.rank : std::int64_t{rank_}, trace::now()}, torch::kInt64);
  const Tensor all = torch::empty({size_, 2}, torch::kInt64);
  run_to_its_end(transport(), call_of(Operation::kAllGather, {mine}, {all}, c10d::AllgatherOptions()));
  const auto* const numbers = all.const_data_ptr<std::int64_t>();
  auto group = std::make_shared<MessageGroup>();
  group->id = mix_numbers(numbers[0], numbers[1]);
  group->rank = rank_;
  for (int rank = 0; rank < size_; ++rank) group->in_job.push_back(to_int(numbers[2 * rank]));
  return group;
}

// Only the group of all ranks is traced.
void C10dBackend::trace_if_asked(const std::vector<int>& machine_of) {
  const JobEnvironment job = job_environment_or_none();
  if (job.world_size > 1 && (job.world_size != size_ || job.rank != rank_)) return;
  const auto exchange = [this](OpType type) {
    return [this, type](const Tensor& tensor, int peer) {
      Tensors tensors{tensor};
      start_message(type, tensors, peer, /*tag=*/0)->wait();
    };
  };
  lockstep::trace_if_asked([&] {
    return ClockPeers{
        .rank = rank_, .machine_of = machine_of, .send = exchange(OpType::SEND), .receive = exchange(OpType::RECV)};
  });
}

C10dBackend::~C10dBackend() {
  if (transport_ != nullptr && !transport_.get_deleter().process.is_here()) return;  // a forked child
  if (std::uncaught_exceptions() > 0) abort();
  try {
    shutdown();
  } catch (const std::exception&) {  // the peers notice, and no one is left here to be told
  }
}

c10::intrusive_ptr<c10d::Backend::Options> C10dBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void C10dBackend::setTimeout(milliseconds timeout) {
  transport().set_timeout(timeout);
  timeout_ = timeout;
}

c10::intrusive_ptr<c10d::Backend> C10dBackend::split(const StorePtr& store, const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  const int place = index_of(ranks, rank_), size = to_int(ranks.size());
  if (place == size) return nullptr;
  return c10::make_intrusive<C10dBackend>(store, place, size, options ? options->timeout : timeout_, machine_);
}

void C10dBackend::shutdown() {
  if (transport_ == nullptr) return;
  if (transport_->queue().inside()) {
    // Out of a callback, which may hold the last reference to the backend: the callback itself has to end first.
    std::thread([transport = std::move(transport_)] { transport->queue().run_all(); }).detach();
    return;
  }
  transport_->queue().run_all();
  transport_.reset();
}

void C10dBackend::abort() {
  if (transport_ != nullptr) transport_->fail("abort() was called, or an exception left the process group");
}

CpuTransport& C10dBackend::transport() const {
  if (transport_ != nullptr) return *transport_;
  throw UsageError({.what = "a call on a lockstep backend after its shutdown",
                    .likely = "destroy_process_group() came first",
                    .next = "call it before, or make a new process group"});
}

Tensor C10dBackend::allocateTensor(long size, at::TensorOptions options) {
  return transport().allocate({size}, options);
}

template <class CallOptions>
WorkPtr C10dBackend::start(OpType type, std::vector<TensorCall> calls, Tensors results, const CallOptions& options) {
  if (options.timeout != c10d::kUnsetTimeout)
    for (TensorCall& each : calls) each.timeout = options.timeout;
  auto body = [calls = std::move(calls)](Transport& transport) {
    for (const TensorCall& call : calls) run_to_its_end(transport, call);
  };
  return start(type, std::move(body), std::move(results), options.asyncOp);
}

WorkPtr C10dBackend::start(OpType type, Body body, Tensors results, bool async) {
  ++issued_;
  auto work = c10::make_intrusive<CollectiveWork>(rank_, type, std::move(results));
  auto task = [&transport = transport(), work, body = std::move(body)]() mutable {
    const std::exception_ptr error = failure_of([&] { body(transport); });
    body = nullptr;  // who has waited is the only one to hold the tensors
    work->complete(error);
  };
  CallQueue& queue = transport().queue();
  if (!async) {
    queue.run(task);
    return work;
  }
  queue.add(std::move(task));
  queue.hand_to_worker();
  return work;
}

GroupRank C10dBackend::member() const { return {rank_, size_}; }

template <class CallOptions>
TensorCall C10dBackend::call_of(Operation operation, const Tensors& inputs, const Tensors& outputs,
                                const CallOptions& options) const {
  Call call{.operation = operation};
  if constexpr (requires { options.rootRank; }) call.root = static_cast<int>(options.rootRank);
  if constexpr (requires { options.reduceOp; })
    return call_to_reduce(member(), std::move(call), inputs, outputs, options.reduceOp);
  else
    return call_to_move(member(), std::move(call), inputs, outputs);
}

template <class CallOptions>
WorkPtr C10dBackend::start_pairs(OpType type, Operation operation, const Tensors& inputs, const Tensors& outputs,
                                 const CallOptions& options) {
  check_pairs(outputs, inputs);
  std::vector<TensorCall> calls;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    calls.push_back(call_of(operation, {inputs[i]}, {outputs[i]}, options));
  return start(type, std::move(calls), outputs, options);
}

// ---- Reductions

WorkPtr C10dBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (const Tensor& tensor = only_one(tensors, "tensors for all_reduce"); tensor.is_sparse())
    return start(OpType::ALLREDUCE, sparse_all_reduce(member(), tensor, options), tensors, options.asyncOp);
  return start(OpType::ALLREDUCE, {call_of(Operation::kAllReduce, tensors, tensors, options)}, tensors, options);
}

WorkPtr C10dBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return start_pairs(OpType::ALLREDUCE_COALESCED, Operation::kAllReduce, tensors, tensors, options);
}

WorkPtr C10dBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  only_one(tensors, "tensors for reduce");
  const Tensors outputs = options.rootRank == rank_ ? tensors : Tensors();
  return start(OpType::REDUCE, {call_of(Operation::kReduce, tensors, outputs, options)}, tensors, options);
}

WorkPtr C10dBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  const Tensors& whole = only_one(inputs, "lists of input tensors");
  only_one(outputs, "output tensors");
  return start(OpType::REDUCE_SCATTER, {call_of(Operation::kReduceScatter, whole, outputs, options)}, outputs, options);
}

WorkPtr C10dBackend::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  return start(OpType::_REDUCE_SCATTER_BASE, {call_of(Operation::kReduceScatter, {input}, {output}, options)}, {output},
               options);
}

WorkPtr C10dBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  return start_pairs(OpType::COALESCED, Operation::kReduceScatter, inputs, outputs, options);
}

// ---- Moving data

WorkPtr C10dBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  only_one(tensors, "tensors for broadcast");
  return start(OpType::BROADCAST, {call_of(Operation::kBroadcast, tensors, tensors, options)}, tensors, options);
}

WorkPtr C10dBackend::barrier(const c10d::BarrierOptions& options) {
  return start(OpType::BARRIER, {{{.operation = Operation::kBarrier}}}, {}, options);
}

void C10dBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const auto timeout = options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout;
  const auto send = [this](Tensors& byte, int to) { return start_message(OpType::SEND, byte, to, kBarrierTag); };
  const auto receive = [this](Tensors& byte, int from) { return start_message(OpType::RECV, byte, from, kBarrierTag); };
  if (rank_ > 0) return report_to_rank_0(rank_, send, receive);
  try {
    hear_of_all_ranks(size_, timeout, wait_all_ranks, send, receive);
  } catch (const Error& error) {
    transport().fail(error.text().what);
    throw;
  }
}

WorkPtr C10dBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors& whole = only_one(outputs, "lists of output tensors");
  only_one(inputs, "input tensors");
  return start(OpType::ALLGATHER, {call_of(Operation::kAllGather, inputs, whole, options)}, whole, options);
}

WorkPtr C10dBackend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  return start(OpType::_ALLGATHER_BASE, {call_of(Operation::kAllGather, {input}, {output}, options)}, {output},
               options);
}

// outputs[r][i] is rank r's inputs[i].
WorkPtr C10dBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) {
  for (const Tensors& of_rank : outputs) check_pairs(of_rank, inputs);
  std::vector<TensorCall> calls;
  Tensors results;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors whole;
    for (const Tensors& of_rank : outputs) whole.push_back(of_rank[i]);
    calls.push_back(call_of(Operation::kAllGather, {inputs[i]}, whole, options));
    results.insert(results.end(), whole.begin(), whole.end());
  }
  return start(OpType::ALLGATHER_COALESCED, std::move(calls), std::move(results), options);
}

WorkPtr C10dBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  return start_pairs(OpType::COALESCED, Operation::kAllGather, inputs, outputs, options);
}

WorkPtr C10dBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  only_one(inputs, "input tensors");
  const Tensors whole = options.rootRank == rank_ ? only_one(outputs, "lists of output tensors") : Tensors();
  return start(OpType::GATHER, {call_of(Operation::kGather, inputs, whole, options)}, whole, options);
}

WorkPtr C10dBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  only_one(outputs, "output tensors");
  const Tensors whole = options.rootRank == rank_ ? only_one(inputs, "lists of input tensors") : Tensors();
  return start(OpType::SCATTER, {call_of(Operation::kScatter, whole, outputs, options)}, outputs, options);
}

WorkPtr C10dBackend::alltoall_base(Tensor& output, Tensor& input, std::vector<std::int64_t>& output_splits,
                                   std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  const Call call{.operation = Operation::kAllToAll,
                  .counts = counts_of_rows(input, input_splits, size_, "the input"),
                  .receive_counts = counts_of_rows(output, output_splits, size_, "the output")};
  return start(OpType::ALLTOALL_BASE, {call_to_move(member(), call, {input}, {output})}, {output}, options);
}

WorkPtr C10dBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const Call call{.operation = Operation::kAllToAll,
                  .counts = counts_of_tensors(inputs, size_),
                  .receive_counts = counts_of_tensors(outputs, size_)};
  return start(OpType::ALLTOALL, {call_to_move(member(), call, inputs, outputs)}, outputs, options);
}

// ---- Messages

WorkPtr C10dBackend::send(Tensors& tensors, int to, int tag) { return start_message(OpType::SEND, tensors, to, tag); }

WorkPtr C10dBackend::recv(Tensors& tensors, int from, int tag) {
  return start_message(OpType::RECV, tensors, from, tag);
}

WorkPtr C10dBackend::recvAnysource(Tensors& tensors, int tag) {
  return start_message(OpType::RECVANYSOURCE, tensors, kAnyRank, tag);
}

WorkPtr C10dBackend::start_message(OpType type, Tensors& tensors, int peer, std::int64_t tag) {
  only_one(tensors, "tensors for a message");
  const bool sends = type == OpType::SEND;
  const Call call{.operation = sends ? Operation::kSend : Operation::kReceive, .peer = peer, .tag = tag};
  const TensorCall message = call_to_move(member(), call, sends ? tensors : Tensors(), sends ? Tensors() : tensors);
  message.begin();
  const std::int64_t began = trace::now_if_recording();
  TracedMessage traced(messages_, message);
  FuturePtr future = transport().start(message);
  if (sends) traced.write(began, peer);
  return c10::make_intrusive<MessageWork>(rank_, type, tensors, message, std::move(traced), std::move(future));
}

}  // namespace lockstep
