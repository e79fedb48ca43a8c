// SPDX-License-Identifier: Apache-2.0
#include "tests/simulated_cuda/nccl.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <map>
#include <optional>
#include <sstream>

#include <unistd.h>

#include "tests/simulated_cuda/happens_before.h"
#include "tests/simulated_cuda/operators.h"
#include "tests/simulated_cuda/simulator.h"
#include "tests/simulated_cuda/worker.h"

namespace simulated_cuda {
namespace {

using Gloo = c10d::ProcessGroupGloo;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using Splits = std::vector<int64_t>;

// c10d's flight recorder, one per process, is not made for several threads (2.11).
const bool kNoFlightRecorder = ::setenv("TORCH_FR_BUFFER_SIZE", "0", 0) == 0;

struct NcclCall {
  const char* name;
  c10d::OpType type;
  Tensors inputs{}, outputs{};
  std::string same{};  // what must be equal on all ranks
};

// A call under way. Its end on the device is the moment after which all that it did is over.
class NcclWork final : public c10d::Work {
 public:
  NcclWork(int rank, const NcclCall& call, c10::Stream stream, Clock end, std::shared_future<void> done, Tensors kept)
      : Work(rank, call.type),
        name_(call.name),
        stream_(stream),
        end_(std::move(end)),
        done_(std::move(done)),
        kept_(std::move(kept)) {}

  bool isCompleted() override {
    if (hangs(stream_) || done_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return false;
    const Lock lock(mutex());
    host_waits(end_);
    return true;
  }

  bool isSuccess() const override {
    try {
      done_.get();
      return true;
    } catch (...) {
      return false;
    }
  }

  // The current stream waits. This thread does, too, because what it issues next runs at once.
  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout && (hangs(stream_) || done_.wait_for(timeout) != std::future_status::ready))
      C10_THROW_ERROR(DistBackendError, "the call timed out (simulated NCCL)");
    done_.get();
    const Lock lock(mutex());
    if (leave_out(name_, stream_.device_index())) return true;
    const c10::Stream current = current_stream(stream_.device_index());
    if (hangs(stream_)) hang_with(current);
    simulated_cuda::wait(current, end_);
    if (timeout != kNoTimeout) host_waits(end_);
    kept_.clear();
    return true;
  }

  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return kept_; }

 private:
  static constexpr auto kNoTimeout = std::chrono::milliseconds(0);
  const char* name_;
  c10::Stream stream_;
  Clock end_;
  std::shared_future<void> done_;
  Tensors kept_;
};

std::string reduction_name(const c10d::ReduceOp& op) {
  static constexpr std::array kNames{"sum", "mean", "product", "min", "max"};
  return std::string(" ") + kNames.at(static_cast<size_t>(op.op_));
}

// NCCL has sums, products, minima, maxima and means.
c10d::ReduceOp checked(const c10d::ReduceOp& op) {
  TORCH_CHECK(op.op_ < c10d::ReduceOp::BAND, "Cannot use a bitwise reduction with NCCL (simulated)");
  return op;
}

class Nccl final : public c10d::Backend {
 public:
  Nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size) {
    auto options = Gloo::Options::create(timeout);
    options->devices = {Gloo::createDeviceForHostname("127.0.0.1")};
    options->threads = 2;
    gloo_ = c10::make_intrusive<Gloo>(store, rank, size, options);
  }

  const std::string getBackendName() const override { return "simulated nccl"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor& tensor = one(tensors);
    const c10d::ReduceOp op = checked(options.reduceOp);
    return start({"allreduce", c10d::OpType::ALLREDUCE, tensors, tensors, reduction_name(op) + same_shape(tensor)},
                 [this, op, view = host_view(tensor)] { reduce_all(view, op); });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor& tensor = one(tensors);
    const c10d::ReduceOp op = checked(options.reduceOp);
    const bool is_root = options.rootRank == rank_;
    return start({"reduce", c10d::OpType::REDUCE, tensors, is_root ? tensors : Tensors(),
                  reduction_name(op) + same_shape(tensor) + " root " + std::to_string(options.rootRank)},
                 [this, op, is_root, view = host_view(tensor)] {
                   const at::Tensor sum = view.clone();
                   reduce_all(sum, op);
                   if (is_root) at::Tensor(view).copy_(sum);
                 });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = one(tensors);
    const bool is_root = options.rootRank == rank_;
    return start({"broadcast", c10d::OpType::BROADCAST, is_root ? tensors : Tensors(), is_root ? Tensors() : tensors,
                  same_shape(tensor) + " root " + std::to_string(options.rootRank)},
                 [this, options, view = host_view(tensor)] {
                   Tensors views{view};
                   gloo_->broadcast(views, options)->wait();
                 });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Splits& receive, Splits& send,
                        const c10d::AllToAllOptions&) override {
    check(output);
    check(input);
    return start(
        {"alltoall", c10d::OpType::ALLTOALL_BASE, {input}, {output}},
        [this, receive, send, to = host_view(output), from = host_view(input)] { exchange(to, from, receive, send); });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const at::Tensor& output = one(outputs);
    const Tensors& parts = inputs.front();
    const c10d::ReduceOp op = checked(options.reduceOp);
    for (const at::Tensor& part : parts) check(part);
    return start({"reduce_scatter", c10d::OpType::REDUCE_SCATTER, parts, outputs, reduction_name(op)},
                 [this, op, begin = offset_of_part(parts, rank_), to = host_view(output), from = views_of(parts)] {
                   const at::Tensor all = flat(from);
                   reduce_all(all, op);
                   at::Tensor(to).view(-1).copy_(all.narrow(0, begin, to.numel()));
                 });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    const at::Tensor& input = one(inputs);
    const Tensors& parts = outputs.front();
    return start({"allgather", c10d::OpType::ALLGATHER, inputs, parts},
                 [this, to = views_of(parts), from = host_view(input)] {
                   const at::Tensor all = flat(Tensors(static_cast<size_t>(size_), from));
                   const Splits same(static_cast<size_t>(size_), from.numel());
                   receive_parts(to, all, sizes_of(to), same);
                 });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output};
    std::vector<Tensors> inputs{input.tensor_split(size_)};
    return reduce_scatter(outputs, inputs, options);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> outputs{output.tensor_split(size_)};
    Tensors inputs{input};
    return allgather(outputs, inputs, options);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const at::Tensor& input = one(inputs);
    const Tensors parts = outputs.empty() ? Tensors() : outputs.front();
    return start({"gather", c10d::OpType::GATHER, inputs, parts, "root " + std::to_string(options.rootRank)},
                 [this, root = options.rootRank, to = views_of(parts), from = host_view(input)] {
                   receive_parts(to, from.view(-1), sizes_of(to), only(static_cast<int>(root), from.numel()));
                 });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const at::Tensor& output = one(outputs);
    const Tensors parts = inputs.empty() ? Tensors() : inputs.front();
    return start({"scatter", c10d::OpType::SCATTER, parts, outputs, "root " + std::to_string(options.rootRank)},
                 [this, root = options.rootRank, to = host_view(output), from = views_of(parts)] {
                   const at::Tensor all = from.empty() ? at::empty({0}, to.options()) : flat(from);
                   exchange(to, all, only(static_cast<int>(root), to.numel()), sizes_of(from));
                 });
  }

  // A message that is sent is copied first: NCCL's buffers take small ones so; it is not simulated that large ones wait.
  WorkPtr send(Tensors& tensors, int peer, int) override {
    const at::Tensor snapshot = host_view(one(tensors)).clone();
    const int tag = 2 * ++sent_[peer];
    std::erase_if(sending_,
                  [](const auto& done) { return done.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
    sending_.push_back(std::async(std::launch::async, [this, snapshot, peer, tag] {
      Tensors views{snapshot};
      gloo_->send(views, peer, tag)->wait();
    }));
    return put_on_stream({"send", c10d::OpType::SEND, tensors, {}}, peer,
                         std::async(std::launch::deferred, [] {}).share());
  }

  WorkPtr recv(Tensors& tensors, int peer, int) override {
    const at::Tensor view = host_view(one(tensors));
    const int tag = 2 * ++received_[peer];
    auto done = std::async(std::launch::async, [this, kept = tensors, view, peer, tag] {
                  Tensors views{view};
                  gloo_->recv(views, peer, tag)->wait();
                }).share();
    return put_on_stream({"recv", c10d::OpType::RECV, {}, tensors}, peer, std::move(done));
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return start({"barrier", c10d::OpType::BARRIER}, [] {});
  }

 private:
  static void check(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(),
                "No backend type associated with device type cpu: Tensors must be CUDA and dense (simulated NCCL)");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous (simulated NCCL)");
  }
  static const at::Tensor& one(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got ", tensors.size(), " (simulated NCCL)");
    check(tensors.front());
    return tensors.front();
  }

  static std::string same_shape(const at::Tensor& tensor) {
    return " of " + std::to_string(tensor.numel()) + " " + c10::toString(tensor.scalar_type()) + "s";
  }
  static Tensors views_of(const Tensors& tensors) {
    Tensors views;
    for (const at::Tensor& tensor : tensors) views.push_back(host_view(tensor));
    return views;
  }
  static Splits sizes_of(const Tensors& tensors) {
    Splits sizes;
    for (const at::Tensor& tensor : tensors) sizes.push_back(tensor.numel());
    return sizes;
  }
  static int64_t offset_of_part(const Tensors& parts, int part) {
    int64_t offset = 0;
    for (int i = 0; i < part; ++i) offset += parts[static_cast<size_t>(i)].numel();
    return offset;
  }
  static at::Tensor flat(const Tensors& tensors) {
    Tensors rows;
    for (const at::Tensor& tensor : tensors) rows.push_back(tensor.reshape({-1}));
    return at::cat(rows);
  }
  Splits only(int root, int64_t count) const {
    Splits splits(static_cast<size_t>(size_), 0);
    splits[static_cast<size_t>(root)] = count;
    return splits;
  }

  // ---- On the worker's thread

  void reduce_all(const at::Tensor& view, const c10d::ReduceOp& op) const {
    Tensors views{view};
    const bool is_mean = op.op_ == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    gloo_->allreduce(views, options)->wait();
    if (is_mean) at::Tensor(view).div_(size_);
  }

  void exchange(at::Tensor to, at::Tensor from, Splits receive, Splits send) const {
    if (receive.empty()) receive.assign(static_cast<size_t>(size_), to.numel() / size_);
    if (send.empty()) send.assign(static_cast<size_t>(size_), from.numel() / size_);
    at::Tensor flat_to = to.view(-1);
    at::Tensor flat_from = from.reshape({-1});
    gloo_->alltoall_base(flat_to, flat_from, receive, send)->wait();
  }

  void receive_parts(const Tensors& parts, const at::Tensor& from, Splits receive, Splits send) const {
    if (parts.empty()) receive.assign(static_cast<size_t>(size_), 0);
    const at::Tensor all = at::empty({offset_of_part(parts, static_cast<int>(parts.size()))}, from.options());
    exchange(all, from, receive, send);
    int64_t begin = 0;
    for (const at::Tensor& part : parts) {
      at::Tensor(part).view(-1).copy_(all.narrow(0, begin, part.numel()));
      begin += part.numel();
    }
  }

  // All ranks tell each other what they call, and on which GPU.
  void agree(const std::string& call, const std::string& gpu) const {
    constexpr int64_t kLength = 256;
    at::Tensor mine = at::zeros({kLength}, at::kByte);
    const std::string text = (call + '\n' + gpu).substr(0, kLength - 1);
    std::copy(text.begin(), text.end(), mine.mutable_data_ptr<uint8_t>());
    Tensors all;
    for (int rank = 0; rank < size_; ++rank) all.push_back(at::zeros_like(mine));
    std::vector<Tensors> outputs{all};
    Tensors inputs{mine};
    gloo_->allgather(outputs, inputs)->wait();
    for (int rank = 0; rank < size_; ++rank) {
      const std::string other(reinterpret_cast<const char*>(all[static_cast<size_t>(rank)].const_data_ptr<uint8_t>()));
      const size_t line = other.find('\n');
      TORCH_CHECK(other.substr(0, line) == call, "lockstep simulator: NCCL would hang or mix data: rank ", rank_,
                  " calls ", call, ", rank ", rank, " calls ", other.substr(0, line));
      TORCH_CHECK(rank == rank_ || other.substr(line + 1) != gpu, "Duplicate GPU detected : rank ", rank_, " and rank ",
                  rank, " both on CUDA device ", gpu, " (simulated NCCL)");
    }
  }

  // ---- On the thread of the rank

  static std::string physical(int device) {
    std::array<char, HOST_NAME_MAX + 1> host{};
    ::gethostname(host.data(), host.size() - 1);
    return std::to_string(settings().visible[static_cast<size_t>(device)]) + " of " + host.data();
  }

  WorkPtr start(const NcclCall& call, std::function<void()> body) {
    const std::string what = std::string(call.name) + call.same;
    const std::string gpu = physical(device_of_call(call));
    auto put = [&](const auto& done) { return put_on_stream(call, -1, done); };
    std::promise<void> issued;
    auto done = worker_.run([this, what, gpu, call, body = std::move(body), go = issued.get_future().share()] {
      go.get();
      agree(what, gpu);
      body();
    });
    WorkPtr work;
    try {
      work = put(done);
    } catch (...) {  // refused on the device: the other ranks are not met
      issued.set_exception(std::current_exception());
      throw;
    }
    issued.set_value();
    return work;
  }

  static int device_of_call(const NcclCall& call) {
    for (const Tensors* list : {&call.inputs, &call.outputs})
      if (!list->empty()) return list->front().get_device();
    return current_device();
  }

  // Notes the call on a stream of its own: one for collectives (-1) and one for each peer.
  WorkPtr put_on_stream(const NcclCall& call, int peer, std::shared_future<void> done) {
    const int device = device_of_call(call);
    const std::string name = std::string("nccl ") + call.name;
    before_operator(name, device);
    const Lock lock(mutex());
    const c10::Stream stream = stream_of(device, peer);
    const c10::Stream current = current_stream(device);
    if (hangs(current)) hang_with(stream);
    wait(stream, clock_of(current));
    std::vector<Touch> touched;
    Tensors kept = call.inputs;
    kept.insert(kept.end(), call.outputs.begin(), call.outputs.end());
    for (const at::Tensor& input : call.inputs) {
      touched.push_back({input, false});
      counters(device).collectives += static_cast<uint64_t>(input.nbytes());
    }
    for (const at::Tensor& output : call.outputs) touched.push_back({output, true});
    put(name, stream, touched);
    return c10::make_intrusive<NcclWork>(rank_, call, stream, clock_of(stream), std::move(done), std::move(kept));
  }

  c10::Stream stream_of(int device, int peer) {
    const auto found = streams_.find({device, peer});
    if (found != streams_.end()) return found->second;
    return streams_.emplace(std::pair(device, peer), new_stream(device)).first->second;
  }

  c10::intrusive_ptr<Gloo> gloo_;
  std::map<std::pair<int, int>, c10::Stream> streams_;
  std::map<int, int> sent_, received_;
  std::vector<std::future<void>> sending_;
  Worker worker_;
};

}  // namespace
}  // namespace simulated_cuda

extern "C" c10d::Backend* lockstep_simulated_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  std::chrono::milliseconds timeout) {
  return c10::make_intrusive<simulated_cuda::Nccl>(store, rank, size, timeout).release();
}
