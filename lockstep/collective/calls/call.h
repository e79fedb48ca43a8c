// SPDX-License-Identifier: Apache-2.0
// collective/calls/call.h: one collective call or message, as World, the transports and the shared-memory core all see it.
//
// Flow:    World, c10d backend -> Call -> Transport -> collective/shm/ inside a machine, collective/machines/ between
// Owns:    nothing: the memory is the caller's and must stay until the call is done
// Threads: values
// Ranks:   all ranks make the same calls in the same order. Signature is what must be equal in all of them
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/collective_types.h"
#include "lockstep/deadline.h"

namespace lockstep {

// Each operation reads and writes, with p ranks and counts in elements, zero allowed:
//
//   operation       input                    output                   count is of
//   barrier         -                        -                        -
//   all_reduce      (count)                  (count)                  the array
//   reduce          (count)                  (count), at root         the array
//   broadcast       -                        (count), root's is sent  the array
//   reduce_scatter  a part per rank          the own part             a part
//   all_gather      the own part             a part per rank          a part
//   gather          the own part             a part per rank, at root a part
//   scatter         a part per rank, at root the own part             a part
//   all_to_all      a part for each rank     a part from each rank    a part
//   send            (count)                  -                        the array
//   receive         -                        (count)                  the array
//
// Parts lie one after the other in rank order. Where they differ in length `counts` has one entry per rank and replaces
// `count`; all_to_all then needs receive_counts too. Input and output are the same memory or do not overlap; all_to_all
// needs two.
struct Call {
  Operation operation = Operation::kBarrier;
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;
  std::vector<size_t> counts{};          // all_to_all: what this rank sends to each
  std::vector<size_t> receive_counts{};  // all_to_all: what it receives from each
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  Algorithm algorithm = Algorithm::kDirect;  // of all_reduce
  int peer = kAnyRank;                       // of a message: the other rank; kAnyRank for a receive only
  int64_t tag = 0;                           // of a message
  milliseconds timeout{};                    // of this call's waits; 0: the world's
};

// Refuses arguments that make no sense, before anything is announced, on the rank that made the mistake. `size`: the
// number of ranks. Every transport, and shm::Group, calls it first. Throws UsageError.
void check_call(const Call& call, int size);

[[noreturn]] void refuse_forked_child(const std::string& here);  // of a rank: throws UsageError

// An all_to_all whose `from` sends other elements to `to` than that rank expects: throws MismatchError.
[[noreturn]] void refuse_counts(const std::string& from, size_t sent, const std::string& to, size_t expected,
                                const std::string& here = {});

// The part of a call that must be equal on all ranks. Ranks and machines compare it byte by byte; fields that an operation does not have
// keep their defaults.
struct Signature {
  Operation operation = Operation::kNone;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kDirect;
  int32_t root = -1;         // -1: the operation has none; kStep: the phase
  uint64_t count = 0;        // as Call::count; where parts differ, their sum; kStep: the number of the step
  uint64_t counts_hash = 0;  // 0: parts of equal length; kStep: the hash of the settings

  bool operator==(const Signature&) const = default;
};
static_assert(sizeof(Signature) == 24 && std::has_unique_object_representations_v<Signature>);

Signature signature_of(const Call& call);

// The barriers of a training step with shared parameters, in their order (step/step_agreement.h). Each is announced
// as what it belongs to, so that ranks at different places get an error and don't take one barrier for another.
enum class StepPhase : int32_t {
  kBackward,     // all gradients are published
  kMean,         // every gradient has a place on every rank
  kMeanEnd,      // .grad is the mean on every rank
  kStep,         // all ranks begin to update, with the same settings
  kNorms,        // the norms of all gradients are there
  kTrustRatios,  // the norms of all directions are there
  kStepEnd,      // all slices are updated
  kParametersWritten,
};

// number: of the backward() or step(). settings: a hash of what must be alike in a step().
Signature signature_of(StepPhase phase, uint64_t number, uint64_t settings = 0);
std::string to_string(const Signature& signature);  // "all_reduce of 100 float32 (sum)"

inline bool is_message(Operation operation) {
  return operation == Operation::kSend || operation == Operation::kReceive;
}

}  // namespace lockstep
