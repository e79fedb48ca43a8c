#include "lockstep/collective/machines/machine_check.h"

#include <bit>
#include <span>

#include "lockstep/base/text.h"
#include "lockstep/collective/torch_dtype.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::uint32_t kChecks = 0;  // the topic

// FNV-1a.
std::uint64_t fingerprint(std::span<const std::int64_t> numbers) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const std::int64_t number : numbers) hash = (hash ^ static_cast<std::uint64_t>(number)) * 0x100000001b3;
  return hash;
}

std::uint32_t topic_of(const Wish& wish) {
  const auto numbers = std::bit_cast<std::array<std::int64_t, sizeof(Wish) / sizeof(std::int64_t)>>(wish);
  const std::uint64_t hash = fingerprint(numbers);
  return static_cast<std::uint32_t>(hash ^ hash >> 32) | 1;
}

MismatchError mismatch(const std::string& one, const Wish& wants, const std::string& other, const Wish& wants_other) {
  return MismatchError(
      {.what = concat(one, " wants ", to_string(wants), ", ", other, " wants ", to_string(wants_other)),
       .likely = "ranks that do not make the same calls in the same order",
       .next = "compare the programs and their inputs on both machines"});
}

std::byte* bytes_of(const Wish& wish) { return reinterpret_cast<std::byte*>(const_cast<Wish*>(&wish)); }

}  // namespace

// all_to_all: what a rank gives to whom is its own affair, and its receivers'.
Wish wish_of(const Collective& call, std::size_t count) {
  const torch::Tensor& some = call.input.defined() ? call.input : call.output;
  const bool own_parts = call.operation == Operation::kAllToAll && !call.counts.empty();
  return {.operation = static_cast<std::int64_t>(call.operation),
          .dtype = static_cast<std::int64_t>(*to_dtype(some.scalar_type())),
          .op = static_cast<std::int64_t>(call.op),
          .algorithm = static_cast<std::int64_t>(call.algorithm),
          .root = call.root,
          .count = own_parts ? 0 : static_cast<std::int64_t>(count),
          .parts = own_parts             ? 1
                   : call.counts.empty() ? 0
                                         : static_cast<std::int64_t>(fingerprint(call.counts) | 1)};
}

Signature intent_of(const Wish& wish) {
  const auto operation = static_cast<Operation>(wish.operation);
  const bool has_root = operation == Operation::kReduce || operation == Operation::kBroadcast ||
                        operation == Operation::kGather || operation == Operation::kScatter;
  return {.operation = operation,
          .dtype = static_cast<DType>(wish.dtype),
          .op = static_cast<ReduceOp>(wish.op),
          .algorithm = static_cast<Algorithm>(wish.algorithm),
          .root = has_root ? static_cast<std::int32_t>(wish.root) : -1,
          .count = static_cast<std::uint64_t>(wish.count),
          .counts_hash = static_cast<std::uint64_t>(wish.parts)};
}

void run_inside(shm::Group& inside, const Wish& wish, std::size_t piece, const Call& call) {
  if (piece == 0)
    inside.run_as(intent_of(wish), call);
  else
    inside.run(call);
}

std::string to_string(const Wish& wish) {
  if (static_cast<Operation>(wish.operation) == Operation::kBarrier) return "barrier";
  return concat(to_string(static_cast<Operation>(wish.operation)), " of ", wish.count, " ",
                to_string(static_cast<DType>(wish.dtype)), " (",
                to_string(static_cast<ReduceOp>(wish.op)), ", ",
                to_string(static_cast<Algorithm>(wish.algorithm)), ", root ", wish.root,
                wish.parts == 0 ? ")" : ", parts of different lengths)");
}

void HostCheck::begin(HostLink& between, const Wish& mine) {
  said_.assign(static_cast<std::size_t>(between.nodes()), mine);
  receives_.resize(said_.size());
  between.set_topic(kChecks);
  for (const int node : between.others()) {
    const auto at = static_cast<std::size_t>(node);
    between.receive(node, bytes_of(said_[at]), sizeof(Wish), receives_[at]);
    between.send(node, bytes_of(said_[static_cast<std::size_t>(between.node())]), sizeof(Wish), sends_);
  }
  between.set_topic(topic_of(mine));
}

void HostCheck::compare(HostLink& between, int node) {
  between.wait(receives_[static_cast<std::size_t>(node)]);
  const Wish& mine = said_[static_cast<std::size_t>(between.node())];
  if (const Wish& theirs = said_[static_cast<std::size_t>(node)]; theirs != mine)
    throw mismatch(concat("machine ", between.node()), mine, concat("machine ", node), theirs);
}

void HostCheck::finish(HostLink& between) {
  for (int node = 0; node < between.nodes(); ++node) compare(between, node);
  between.wait(sends_);
}

void HostCheck::give_up() {
  for (auto& receives : receives_) receives.clear();
  sends_.clear();
}

}  // namespace lockstep
