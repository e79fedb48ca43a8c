// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/call.h"

#include <numeric>
#include <span>

#include "lockstep/base/text.h"

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

// FNV-1a over the words; never 0, which means parts of equal length.
std::uint64_t hash_of(std::span<const std::size_t> counts) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const std::size_t count : counts) hash = (hash ^ count) * 0x100000001b3;
  return hash | 1;
}

std::string text_of_step(const Signature& signature) {
  switch (static_cast<StepPhase>(signature.root)) {
    case StepPhase::kBackward: return concat("the exchange of gradients number ", signature.count);
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
  if (signature.algorithm == Algorithm::kDirect) return concat(" (", to_string(signature.op), ")");
  return concat(" (", to_string(signature.op), ", ", to_string(signature.algorithm), ")");
}

}  // namespace

Signature signature_of(const Call& call) {
  if (call.operation == Operation::kBarrier) return {.operation = call.operation};
  Signature signature{.operation = call.operation, .dtype = call.dtype, .count = call.count};
  if (reduces(call.operation)) signature.op = call.op;
  if (call.operation == Operation::kAllReduce) signature.algorithm = call.algorithm;
  if (has_root(call.operation)) signature.root = call.root;
  if (call.counts.empty()) return signature;
  // Which counts an uneven all_to_all has is between each two ranks; that it is uneven must be known to all.
  const bool pairwise = call.operation == Operation::kAllToAll;
  signature.count = pairwise ? 0 : std::accumulate(call.counts.begin(), call.counts.end(), std::size_t{0});
  signature.counts_hash = pairwise ? 1 : hash_of(call.counts);
  return signature;
}

Signature signature_of(StepPhase phase, std::uint64_t number, std::uint64_t settings) {
  return {.operation = Operation::kStep,
          .root = static_cast<std::int32_t>(phase),
          .count = number,
          .counts_hash = settings};
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
