// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include "lockstep/collective/c10d/backend_calls.h"
#include "lockstep/collective/trace_if_asked.h"
#include "lockstep/collective/traced_messages.h"
#include "lockstep/collective/transport/connect.h"

namespace lockstep {

using namespace backend;
using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// ---- What it returns for each call. It owns the tensors of the call; those of a message are held by the transport
// too, as nobody need keep its Work.

namespace {

// Returns what `body` threw, or null.
template <class Body>
std::exception_ptr failure_of(const Body& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(int rank, c10d::OpType type, Tensors results)
      : c10d::Work(rank, type),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  Tensors result() override { return results_; }

  // The future first, as Gloo: who has waited finds it done, and its callbacks. One that throws must not leave others
  // waiting: unless the call itself failed, its error is the Work's.
  void complete(const std::exception_ptr& error) {
    const std::exception_ptr of_callback = failure_of([&] {
      if (error)
        future_->setError(error);
      else
        future_->markCompleted(c10::IValue(results_));
    });
    finish(error ? error : of_callback);
  }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A send or receive of one tensor, which is complete once wait(), or isCompleted(), has said so.
class MessageWork final : public c10d::Work {
 public:
  MessageWork(int rank, c10d::OpType type, Tensors tensors, TensorCall call, TracedMessage traced, FuturePtr future)
      : c10d::Work(rank, type),
        tensors_(std::move(tensors)),
        call_(std::move(call)),
        traced_(std::move(traced)),
        future_(std::move(future)) {}

  bool isCompleted() override {
    if (future_->done()) settle(trace::now_if_recording());
    return c10d::Work::isCompleted();
  }
  bool isSuccess() const override { return future_->done() && c10d::Work::isSuccess(); }
  int sourceRank() const override { return future_->source(); }
  Tensors result() override { return tensors_; }

  bool wait(milliseconds timeout) override {
    const int64_t began = trace::now_if_recording();
    future_->wait(timeout == kNoTimeout ? std::nullopt : std::optional(Deadline::after(timeout)));
    settle(began);
    return c10d::Work::wait(kNoTimeout);
  }

 private:
  void settle(int64_t began) {
    std::call_once(settled_, [&] {
      finish(failure_of([&] {
        future_->wait();
        call_.finish();
        if (call_.operation == Operation::kReceive) traced_.write(began, future_->source());
      }));
    });
  }

  Tensors tensors_;
  TensorCall call_;
  TracedMessage traced_;
  FuturePtr future_;
  std::once_flag settled_;
};

// ---- The process group

class C10dBackend final : public c10d::Backend {
 public:
  C10dBackend(const StorePtr& store, int rank, int size, milliseconds timeout, std::string machine)
      : Backend(rank, size), timeout_(timeout), machine_(std::move(machine)) {
    const TransportOptions options{
        .rank = rank, .size = size, .describe = concat("rank ", rank, " of ", size), .timeout = timeout};
    CpuConnection connection = connect_cpu_ranks(store, machine_, options);
    transport_ = std::move(connection.transport);
    messages_ = exchange_numbers();
    trace_if_asked(connection.machine_of);
  }

  ~C10dBackend() override {
    if (transport_ != nullptr && !transport_.get_deleter().process.is_here()) return;  // a forked child
    if (std::uncaught_exceptions() > 0) abort();
    try {
      shutdown();
    } catch (const std::exception&) {  // the peers notice, and no one is left here to be told
    }
  }

  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), timeout_);
  }
  void setTimeout(milliseconds timeout) override {
    transport().set_timeout(timeout);
    timeout_ = timeout;
  }
  void setSequenceNumberForGroup() override {}  // the core numbers and compares every collective itself
  uint64_t getSequenceNumberForGroup() override { return issued_; }

  // A backend of its own for some ranks, over its own store; none for the others. They make the call at the same time.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override {
    const int place = index_of(ranks, rank_), size = to_int(ranks.size());
    if (place == size) return nullptr;
    return c10::make_intrusive<C10dBackend>(store, place, size, options ? options->timeout : timeout_, machine_);
  }

  void shutdown() override {
    if (transport_ == nullptr) return;
    if (transport_->queue().inside()) {
      // Out of a callback, which may hold the last reference to the backend: the callback itself has to end first.
      std::thread([transport = std::move(transport_)] { transport->queue().run_all(); }).detach();
      return;
    }
    transport_->queue().run_all();
    transport_.reset();
  }

  void abort() override {
    if (transport_ != nullptr) transport_->fail("abort() was called, or an exception left the process group");
  }

  // Tensors from here are read by peers where they lie: their collectives copy nothing. They may outlive the backend.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  Tensor allocateTensor(long size, at::TensorOptions options) override { return transport().allocate({size}, options); }

  // ---- Reductions

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (const Tensor& tensor = only_one(tensors); tensor.is_sparse())
      return start(OpType::ALLREDUCE, sparse_all_reduce(member(), tensor, options), tensors, options.asyncOp);
    return start_pairs(OpType::ALLREDUCE, Operation::kAllReduce, tensors, tensors, options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return start_pairs(OpType::ALLREDUCE_COALESCED, Operation::kAllReduce, tensors, tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    only_one(tensors);
    const Tensors outputs = options.rootRank == rank_ ? tensors : Tensors();
    return start(OpType::REDUCE, {call_of(Operation::kReduce, tensors, outputs, options)}, tensors, options);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const Tensors& whole = only_one(inputs);
    only_one(outputs);
    return start(OpType::REDUCE_SCATTER, {call_of(Operation::kReduceScatter, whole, outputs, options)}, outputs,
                 options);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return start_pairs(OpType::_REDUCE_SCATTER_BASE, Operation::kReduceScatter, {input}, {output}, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return start_pairs(OpType::COALESCED, Operation::kReduceScatter, inputs, outputs, options);
  }

  // ---- Moving data

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    only_one(tensors);
    return start_pairs(OpType::BROADCAST, Operation::kBroadcast, tensors, tensors, options);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start(OpType::BARRIER, {{{.operation = Operation::kBarrier}}}, {}, options);
  }

  // If it fails on rank 0, the group has failed: the other ranks get PeerLost.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override try {
    const auto timeout = options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout;
    monitored_barrier(*this, timeout, wait_all_ranks);
  } catch (const Error& error) {
    if (rank_ == 0) transport().fail(error.text().what);
    throw;
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const Tensors& whole = only_one(outputs);
    only_one(inputs);
    return start(OpType::ALLGATHER, {call_of(Operation::kAllGather, inputs, whole, options)}, whole, options);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return start_pairs(OpType::_ALLGATHER_BASE, Operation::kAllGather, {input}, {output}, options);
  }

  // outputs[r][i] is rank r's inputs[i].
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    for (const Tensors& of_rank : outputs) require_number(of_rank.size(), inputs.size());
    std::vector<TensorCall> calls;
    Tensors results;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors whole;
      for (const Tensors& of_rank : outputs) whole.push_back(of_rank[i]);
      calls.push_back(call_of(Operation::kAllGather, {inputs[i]}, whole, options));
      results.insert(results.end(), whole.begin(), whole.end());
    }
    return start(OpType::ALLGATHER_COALESCED, std::move(calls), std::move(results), options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return start_pairs(OpType::COALESCED, Operation::kAllGather, inputs, outputs, options);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    only_one(inputs);
    const Tensors whole = options.rootRank == rank_ ? only_one(outputs) : Tensors();
    return start(OpType::GATHER, {call_of(Operation::kGather, inputs, whole, options)}, whole, options);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    only_one(outputs);
    const Tensors whole = options.rootRank == rank_ ? only_one(inputs) : Tensors();
    return start(OpType::SCATTER, {call_of(Operation::kScatter, whole, outputs, options)}, outputs, options);
  }

  // Split sizes are rows of the first dimension; empty ones: equal parts.
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    const Call call{.operation = Operation::kAllToAll,
                    .counts = counts_of_rows(input, input_splits, size_, "all_to_all's input"),
                    .receive_counts = counts_of_rows(output, output_splits, size_, "all_to_all's output")};
    return start(OpType::ALLTOALL_BASE, {call_to_move(member(), call, {input}, {output})}, {output}, options);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const Call call{.operation = Operation::kAllToAll,
                    .counts = counts_of_tensors(inputs, size_),
                    .receive_counts = counts_of_tensors(outputs, size_)};
    return start(OpType::ALLTOALL, {call_to_move(member(), call, inputs, outputs)}, outputs, options);
  }

  // ---- Messages, which are not ordered with collectives. Their Work has no future, as that of Gloo.

  WorkPtr send(Tensors& tensors, int to, int tag) override { return start_message(OpType::SEND, tensors, to, tag); }

  WorkPtr recv(Tensors& tensors, int from, int tag) override { return start_message(OpType::RECV, tensors, from, tag); }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return start_message(OpType::RECVANYSOURCE, tensors, kAnyRank, tag);
  }

 private:
  using Body = std::function<void(Transport& transport)>;

  GroupRank member() const { return {rank_, size_}; }

  // All ranks tell each other what they are in the job: where the launcher has not numbered them, what they are here.
  std::shared_ptr<MessageGroup> exchange_numbers() const {
    const JobEnvironment job = job_environment_or_none();
    const Tensor mine = torch::tensor({job.world_size > 1 ? job.rank : int64_t{rank_}, trace::now()}, torch::kInt64);
    const Tensor all = torch::empty({size_, 2}, torch::kInt64);
    run_to_its_end(transport(), call_of(Operation::kAllGather, {mine}, {all}, c10d::AllgatherOptions()));
    const auto* const numbers = all.const_data_ptr<int64_t>();
    auto group = std::make_shared<MessageGroup>();
    group->id = mix_numbers(numbers[0], numbers[1]);
    group->rank = rank_;
    for (int rank = 0; rank < size_; ++rank) group->in_job.push_back(to_int(numbers[2 * rank]));
    return group;
  }

  // Only the group of all ranks is traced.
  void trace_if_asked(const std::vector<int>& machine_of) {
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

  // Throws UsageError after shutdown().
  CpuTransport& transport() const {
    if (transport_ != nullptr) return *transport_;
    throw UsageError({.what = "a call on a lockstep backend after its shutdown",
                      .likely = "destroy_process_group() came first",
                      .next = "call it before, or make a new process group"});
  }

  // The reduction and the root are those of `options`, where it has them.
  template <class CallOptions>
  TensorCall call_of(Operation operation, const Tensors& inputs, const Tensors& outputs,
                     const CallOptions& options) const {
    Call call{.operation = operation, .algorithm = Algorithm::kFastest};
    if constexpr (requires { options.rootRank; }) call.root = static_cast<int>(options.rootRank);
    if constexpr (requires { options.reduceOp; })
      return call_to_reduce(member(), std::move(call), inputs, outputs, options.reduceOp);
    else
      return call_to_move(member(), std::move(call), inputs, outputs);
  }

  // Makes the calls one after the other, as one collective of c10d.
  template <class CallOptions>
  WorkPtr start(OpType type, std::vector<TensorCall> calls, Tensors results, const CallOptions& options) {
    if (options.timeout != c10d::kUnsetTimeout)
      for (TensorCall& each : calls) each.timeout = options.timeout;
    auto body = [calls = std::move(calls)](Transport& transport) {
      for (const TensorCall& call : calls) run_to_its_end(transport, call);
    };
    return start(type, std::move(body), std::move(results), options.asyncOp);
  }

  WorkPtr start(OpType type, Body body, Tensors results, bool async) {
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

  template <class CallOptions>
  WorkPtr start_pairs(OpType type, Operation operation, const Tensors& inputs, const Tensors& outputs,
                      const CallOptions& options) {
    require_number(outputs.size(), inputs.size());
    std::vector<TensorCall> calls;
    for (size_t i = 0; i < outputs.size(); ++i) calls.push_back(call_of(operation, {inputs[i]}, {outputs[i]}, options));
    return start(type, std::move(calls), outputs, options);
  }

  WorkPtr start_message(OpType type, Tensors& tensors, int peer, int64_t tag) {
    only_one(tensors);
    const bool sends = type == OpType::SEND;
    const Call call{.operation = sends ? Operation::kSend : Operation::kReceive, .peer = peer, .tag = tag};
    const TensorCall message = call_to_move(member(), call, sends ? tensors : Tensors(), sends ? Tensors() : tensors);
    message.begin();
    const int64_t began = trace::now_if_recording();
    TracedMessage traced(messages_, message);
    FuturePtr future = transport().start(message);
    if (sends) traced.write(began, peer);
    return c10::make_intrusive<MessageWork>(rank_, type, tensors, message, std::move(traced), std::move(future));
  }

  milliseconds timeout_;
  std::string machine_;
  std::atomic<uint64_t> issued_{0};
  OwnedHere<CpuTransport> transport_;  // none after shutdown()
  std::shared_ptr<MessageGroup> messages_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_c10d_backend(const StorePtr& store, int rank, int size, milliseconds timeout,
                                                    std::string machine) {
  return c10::make_intrusive<C10dBackend>(store, rank, size, timeout, std::move(machine));
}

}  // namespace lockstep
