// SPDX-License-Identifier: Apache-2.0
// Waits of the program that a test leaves out, to see whether anything notices.
#include <string>

#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

struct LeftOut {
  std::string kind;
  int device = 0;
  int number = 0;
  int seen = 0;
};

LeftOut& left_out() {
  static auto* const kLeftOut = new LeftOut;
  return *kLeftOut;
}

}  // namespace

bool leave_out(const char* kind, int device) {
  const Lock lock(mutex());
  LeftOut& of = left_out();
  return of.kind == kind && of.device == device && ++of.seen == of.number;
}

bool waits_are_left_out() { return !left_out().kind.empty(); }

}  // namespace simulated_cuda

extern "C" {

void simulated_cuda_leave_out(const char* kind, int device, int number) {
  const simulated_cuda::Lock lock(simulated_cuda::mutex());
  simulated_cuda::left_out() = {kind, device, number};
}

int simulated_cuda_waits() {
  const simulated_cuda::Lock lock(simulated_cuda::mutex());
  return simulated_cuda::left_out().seen;
}
}
