#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/c10d_call.h"
#include "lockstep/collective/c10d_transport.h"
#include "lockstep/collective/gloo_connection.h"
#include "lockstep/collective/self_transport.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm_dtype.h"

namespace lockstep {
namespace {

using Splits = std::vector<std::int64_t>;
using Tensors = std::vector<torch::Tensor>;

// Gloo moves bytes of any dtype alike.
torch::Tensor bytes_of(const torch::Tensor& tensor) { return tensor.detach().view(-1).view(torch::kUInt8); }

Splits in_bytes(Splits counts, const torch::Tensor& tensor) {
  for (std::int64_t& count : counts) count *= tensor.element_size();
  return counts;
}

Tensors split_bytes(const torch::Tensor& tensor, const Splits& counts) {
  return bytes_of(tensor).split_with_sizes(in_bytes(counts, tensor));
}

// What Gloo can reduce in place of a tensor: it knows no int16, and takes bool for uint8.
torch::Tensor reducible(const torch::Tensor& tensor) {
  if (tensor.scalar_type() == torch::kShort) return tensor.to(torch::kInt);
  return tensor.scalar_type() == torch::kBool ? tensor.detach().view(torch::kUInt8) : tensor.detach();
}

c10d::ReduceOp to_c10d(ReduceOp op, bool of_bool) {
  switch (op) {
    case ReduceOp::kSum: return of_bool ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    case ReduceOp::kMean: return c10d::ReduceOp::SUM;  // divided afterwards
    case ReduceOp::kProduct: return of_bool ? c10d::ReduceOp::MIN : c10d::ReduceOp::PRODUCT;
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kBitAnd: return c10d::ReduceOp::BAND;
    case ReduceOp::kBitOr: return c10d::ReduceOp::BOR;
    case ReduceOp::kBitXor: return c10d::ReduceOp::BXOR;
  }
  return c10d::ReduceOp::SUM;
}

class GlooTransport : public Transport {
 public:
  GlooTransport(c10::intrusive_ptr<c10d::Store> store, TransportOptions options)
      : store_(std::move(store)), options_(std::move(options)), gloo_(connect_gloo(store_, options_)) {}

  std::shared_ptr<Pending> start(Collective call) override {
    if (call.operation != Operation::kBarrier && is_empty(call)) return make_done();
    switch (call.operation) {
      case Operation::kAllReduce: return all_reduce(call);
      case Operation::kReduce: return reduce(call);
      case Operation::kReduceScatter: return reduce_scatter(call);
      case Operation::kAllGather: return call.counts.empty() ? all_gather(call) : all_gather_uneven(call);
      case Operation::kBroadcast: return broadcast(call);
      case Operation::kGather: return gather(call);
      case Operation::kScatter: return scatter(call);
      case Operation::kAllToAll: return all_to_all(call);
      default: return issue("barrier", [&] { return gloo_->barrier(); });
    }
  }

  std::shared_ptr<Pending> start_send(const torch::Tensor& tensor, int to, int tag) override {
    return messages_.start({"send", options_.describe}, [&] {
      Tensors tensors{bytes_of(tensor)};
      return gloo_->send(tensors, to, tag);
    });
  }

  std::shared_ptr<Pending> start_receive(const torch::Tensor& tensor, int from, int tag) override {
    return messages_.start({"receive", options_.describe}, [&] {
      Tensors tensors{bytes_of(tensor)};
      return from == kAnyRank ? gloo_->recvAnysource(tensors, tag) : gloo_->recv(tensors, from, tag);
    });
  }

  std::unique_ptr<Transport> group(const RankLists& lists) override { return separate(lists, options_.timeout); }

  std::unique_ptr<Transport> separate(const RankLists& lists, std::chrono::milliseconds timeout) override {
    const std::vector<int>& ranks = lists[static_cast<std::size_t>(options_.rank)];
    const int made = groups_made_++;
    if (ranks.empty()) return nullptr;
    TransportOptions options = options_of_group(options_, ranks);
    options.timeout = timeout;
    return std::make_unique<GlooTransport>(with_prefix(store_, prefix_of_group(made, ranks)), std::move(options));
  }

  void fail(const std::string&) override { gloo_->close(); }

 private:
  std::shared_ptr<Pending> issue(const char* operation, const std::function<C10dWork()>& call,
                                 std::function<void()> finish = {}) const {
    return start_c10d({operation, options_.describe, std::move(finish)}, call);
  }

  // For all ranks alike: where some of them may give something, it is not.
  static bool is_empty(const Collective& call) {
    const bool nothing_in = !call.input.defined() || call.input.numel() == 0;
    const bool nothing_out = !call.output.defined() || call.output.numel() == 0;
    if (call.operation == Operation::kAllToAll && !call.counts.empty()) return false;
    return nothing_in && nothing_out;
  }

  void check_direct(const Collective& call) const {
    if (call.algorithm == Algorithm::kDirect) return;
    throw UsageError(
        {.what = concat("all_reduce by the algorithm ", shm::to_string(call.algorithm), " between machines"),
         .here = options_.describe,
         .next = "leave the algorithm out, or keep all ranks on one machine"});
  }

  // What is left to do with the reduced `tensor` until `output` has the result.
  std::function<void()> settle(const torch::Tensor& tensor, const Collective& call) const {
    return [tensor, output = call.output.detach(), mean = call.op == ReduceOp::kMean, size = options_.size] {
      if (mean) tensor.div_(size);
      if (tensor.scalar_type() == torch::kInt && output.scalar_type() == torch::kShort) output.copy_(tensor);
    };
  }

  std::shared_ptr<Pending> all_reduce(const Collective& call) const {
    check_direct(call);
    const torch::Tensor tensor = reducible(call.output);
    return issue(
        "all_reduce",
        [&] {
          Tensors tensors{tensor};
          c10d::AllreduceOptions options;
          options.reduceOp = to_c10d(call.op, call.output.scalar_type() == torch::kBool);
          return gloo_->allreduce(tensors, options);
        },
        settle(tensor, call));
  }

  // Gloo uses the tensors of the other ranks as scratch: they give a copy.
  std::shared_ptr<Pending> reduce(const Collective& call) const {
    const bool at_root = call.output.defined();
    const torch::Tensor tensor = at_root ? reducible(call.output) : reducible(call.input.detach().clone());
    return issue(
        "reduce",
        [&] {
          Tensors tensors{tensor};
          c10d::ReduceOptions options;
          options.rootRank = call.root;
          options.reduceOp = to_c10d(call.op, call.input.scalar_type() == torch::kBool);
          return gloo_->reduce(tensors, options);
        },
        at_root ? settle(tensor, call) : std::function<void()>());
  }

  // Each rank gets its part from every rank and reduces it in rank order: Gloo's own would send twice as much.
  std::shared_ptr<Pending> reduce_scatter(const Collective& call) const {
    const std::int64_t part = call.output.numel();
    const Splits send = call.counts.empty() ? even(part) : call.counts;
    const torch::Tensor parts = torch::empty({options_.size * part}, call.input.options().requires_grad(false));
    return exchange(parts, call.input, even(part), send, "reduce_scatter", [call, parts, part] {
      if (part == 0) return;
      std::vector<const std::byte*> sources;
      for (const torch::Tensor& each : parts.split(part))
        sources.push_back(static_cast<const std::byte*>(each.const_data_ptr()));
      std::byte* const destination = static_cast<std::byte*>(call.output.mutable_data_ptr());
      shm::reduce({.sources = sources,
                   .destinations = std::span(&destination, 1),
                   .count = static_cast<std::size_t>(part),
                   .divisor = static_cast<int>(sources.size())},
                  *to_shm_dtype(parts.scalar_type()), call.op);
    });
  }

  std::shared_ptr<Pending> all_gather(const Collective& call) const {
    std::vector<Tensors> outputs{split_bytes(call.output, even(call.input.numel()))};
    return issue("all_gather", [&] {
      Tensors inputs{bytes_of(call.input)};
      return gloo_->allgather(outputs, inputs);
    });
  }

  // Gloo gathers parts of one size: shorter ones are padded.
  std::shared_ptr<Pending> all_gather_uneven(const Collective& call) const {
    const std::int64_t longest = std::ranges::max(call.counts);
    const auto options = call.input.options().requires_grad(false);
    const torch::Tensor padded = torch::zeros({longest}, options);
    padded.narrow(0, 0, call.input.numel()).copy_(call.input.detach().view(-1));
    const torch::Tensor all = torch::empty({options_.size, longest}, options);
    std::vector<Tensors> outputs{split_bytes(all, even(longest))};
    return issue(
        "all_gather",
        [&] {
          Tensors inputs{bytes_of(padded)};
          return gloo_->allgather(outputs, inputs);
        },
        [all, call] {
          Tensors parts = call.output.view(-1).split_with_sizes(call.counts);
          for (std::size_t rank = 0; rank < parts.size(); ++rank)
            parts[rank].copy_(all[static_cast<std::int64_t>(rank)].narrow(0, 0, parts[rank].numel()));
        });
  }

  std::shared_ptr<Pending> broadcast(const Collective& call) const {
    return issue("broadcast", [&] {
      Tensors tensors{bytes_of(call.output)};
      c10d::BroadcastOptions options;
      options.rootRank = call.root;
      return gloo_->broadcast(tensors, options);
    });
  }

  std::shared_ptr<Pending> gather(const Collective& call) const {
    std::vector<Tensors> outputs;
    if (call.output.defined()) outputs.push_back(split_bytes(call.output, even(call.input.numel())));
    return issue("gather", [&] {
      Tensors inputs{bytes_of(call.input)};
      c10d::GatherOptions options;
      options.rootRank = call.root;
      return gloo_->gather(outputs, inputs, options);
    });
  }

  std::shared_ptr<Pending> scatter(const Collective& call) const {
    std::vector<Tensors> inputs;
    if (call.input.defined()) inputs.push_back(split_bytes(call.input, even(call.output.numel())));
    return issue("scatter", [&] {
      Tensors outputs{bytes_of(call.output)};
      c10d::ScatterOptions options;
      options.rootRank = call.root;
      return gloo_->scatter(outputs, inputs, options);
    });
  }

  std::shared_ptr<Pending> all_to_all(const Collective& call) const {
    const bool is_even = call.counts.empty();
    const Splits parts = even(call.input.numel() / options_.size);
    return exchange(call.output, call.input, is_even ? parts : call.receive_counts, is_even ? parts : call.counts,
                    "all_to_all");
  }

  std::shared_ptr<Pending> exchange(const torch::Tensor& output, const torch::Tensor& input, const Splits& receive,
                                    const Splits& send, const char* operation,
                                    std::function<void()> finish = {}) const {
    return issue(
        operation,
        [&] {
          torch::Tensor to = bytes_of(output);
          torch::Tensor from = bytes_of(input);
          Splits receive_bytes = in_bytes(receive, output);
          Splits send_bytes = in_bytes(send, input);
          return gloo_->alltoall_base(to, from, receive_bytes, send_bytes);
        },
        std::move(finish));
  }

  Splits even(std::int64_t count) const { return Splits(static_cast<std::size_t>(options_.size), count); }

  c10::intrusive_ptr<c10d::Store> store_;
  TransportOptions options_;
  Gloo gloo_;
  C10dMessages messages_;
  int groups_made_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, const TransportOptions& options) {
  return std::make_unique<GlooTransport>(store, options);
}

}  // namespace lockstep
