// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/calls/call.h"

#include <utility>

#include "lockstep/base/hash.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/partition.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

bool reduces(Operation operation) {
  return operation == Operation::kAllReduce || operation == Operation::kReduce ||
         operation == Operation::kReduceScatter;
}

bool has_root(Operation operation) {
  return operation == Operation::kReduce || operation == Operation::kBroadcast || operation == Operation::kGather ||
         operation == Operation::kScatter;
}

std::string text_of_step(const Signature& signature) {
  switch (static_cast<StepPhase>(signature.root)) {
    case StepPhase::kBackward: return concat("the exchange of gradients number ", signature.count);
    case StepPhase::kMean:
    case StepPhase::kMeanEnd: return concat("the mean of the gradients of exchange number ", signature.count);
    case StepPhase::kStep: return concat("step() number ", signature.count);
    case StepPhase::kNorms: return concat("the gradients' norms of step() number ", signature.count);
    case StepPhase::kTrustRatios: return concat("the trust ratios of step() number ", signature.count);
    case StepPhase::kStepEnd: return concat("the end of step() number ", signature.count);
    case StepPhase::kParametersWritten: return "parameters_written()";
  }
  return to_string(signature.operation);
}

// "(sum)", "(sum, ring)"
std::string how(const Signature& signature) {
  if (!reduces(signature.operation)) return signature.counts_hash != 0 ? " in uneven parts" : "";
  const bool usual = signature.algorithm == Algorithm::kDirect || signature.algorithm == Algorithm::kFastest;
  const std::string by = usual ? "" : ", " + to_string(signature.algorithm);
  return concat(" (", to_string(signature.op), by, ")");
}

// ---- Checks

[[noreturn]] void refuse(const std::string& what, const std::string& next) {
  throw UsageError({.what = what, .next = next});
}

void check_op(DType dtype, ReduceOp op) {
  if (!shm::defined(dtype, op))
    refuse(concat(to_string(op), " is not defined for ", to_string(dtype)), "convert the data, or choose another op");
}

void check_rank(const char* what, int rank, int size) {
  if (rank < 0 || rank >= size) refuse(concat(what, " ", rank, " of ", size, " ranks"), "count ranks from 0");
}

void check_counts(const std::vector<size_t>& counts, int size) {
  if (!counts.empty() && std::cmp_not_equal(counts.size(), size))
    refuse(concat(counts.size(), " counts for ", size, " ranks"), "give one count per rank");
}

void check_all_to_all(const Call& call, int size) {
  check_counts(call.receive_counts, size);
  if (call.counts.empty() != call.receive_counts.empty())
    refuse("all_to_all with one list of counts", "give the counts of both directions, or neither");
  const shm::Partition sent = shm::Partition::of(call, size);
  const shm::Partition received = call.counts.empty() ? sent : shm::Partition::uneven(call.receive_counts);
  const auto* const input = static_cast<const std::byte*>(call.input);
  const auto* const output = static_cast<const std::byte*>(call.output);
  const size_t element = size_of(call.dtype);
  if (input < output + received.total() * element && output < input + sent.total() * element)
    refuse("all_to_all from memory into itself", "give it an output of its own");
}

}  // namespace

void check_call(const Call& call, int size) {
  check_counts(call.counts, size);
  switch (call.operation) {
    case Operation::kAllReduce:
    case Operation::kReduceScatter: return check_op(call.dtype, call.op);
    case Operation::kReduce: check_op(call.dtype, call.op); [[fallthrough]];
    case Operation::kBroadcast:
    case Operation::kGather:
    case Operation::kScatter: return check_rank("root", call.root, size);
    case Operation::kAllToAll: return check_all_to_all(call, size);
    case Operation::kSend: return check_rank("to", call.peer, size);
    case Operation::kReceive:
      if (call.peer != kAnyRank) check_rank("from", call.peer, size);
      return;
    default: return;
  }
}

void refuse_forked_child(const std::string& here) {
  throw UsageError({.what = "a collective or message in a forked child of a rank",
                    .here = here,
                    .likely = "fork() after World was made: the child is not a rank",
                    .next = "leave collectives, backward() and step() to the parent"});
}

void refuse_counts(const std::string& from, size_t sent, const std::string& to, size_t expected,
                   const std::string& here) {
  throw MismatchError(
      {.what = concat("all_to_all: ", from, " sends ", sent, " elements to ", to, ", which expects ", expected),
       .here = here,
       .likely = "lists of rows that do not fit together",
       .next = "exchange the counts first: World does if receive_rows is left out"});
}

// ---- Signatures

Signature signature_of(const Call& call) {
  if (call.operation == Operation::kBarrier) return {.operation = call.operation};
  Signature signature{.operation = call.operation, .dtype = call.dtype, .count = call.count};
  if (reduces(call.operation)) signature.op = call.op;
  if (call.operation == Operation::kAllReduce) signature.algorithm = call.algorithm;
  if (has_root(call.operation)) signature.root = call.root;
  if (call.counts.empty()) return signature;
  // The counts of an uneven all_to_all concern two ranks each; that it is uneven must be known to all.
  const bool pairwise = call.operation == Operation::kAllToAll;
  signature.count = pairwise ? 0 : shm::Partition::of(call, 0).total();
  const std::string_view bytes(reinterpret_cast<const char*>(call.counts.data()), call.counts.size() * sizeof(size_t));
  signature.counts_hash = pairwise ? 1 : hash_of(bytes) | 1;  // never 0, which means parts of equal length
  return signature;
}

Signature signature_of(StepPhase phase, uint64_t number, uint64_t settings) {
  return {.operation = Operation::kStep, .root = static_cast<int32_t>(phase), .count = number, .counts_hash = settings};
}

std::string to_string(const Signature& signature) {
  if (signature.operation == Operation::kStep) return text_of_step(signature);
  if (signature.operation == Operation::kNone || signature.operation == Operation::kBarrier ||
      signature.operation == Operation::kSubgroup)
    return to_string(signature.operation);
  const std::string root = signature.root < 0 ? "" : concat(" with root ", signature.root);
  return concat(to_string(signature.operation), " of ", signature.count, " ", to_string(signature.dtype),
                how(signature), root);
}

}  // namespace lockstep
