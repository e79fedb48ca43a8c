// SPDX-License-Identifier: Apache-2.0
// What a segmentation fault in a device's memory means, before the process ends by it.
#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>

#include "tests/simulated_cuda/memory.h"
#include "tests/simulated_cuda/traps.h"

namespace simulated_cuda {
namespace {

struct sigaction earlier_action;

// A signal handler: no allocation, no lock but that of a process that ends anyway.
void explain(int number, siginfo_t* info, void* context) {
  const int device = device_of_address(info->si_addr);
  if (device < 0 && (earlier_action.sa_flags & SA_SIGINFO) != 0 && earlier_action.sa_sigaction != nullptr)
    return earlier_action.sa_sigaction(number, info, context);
  if (device >= 0) {
    std::array<char, 400> text{};
    const int length = std::snprintf(text.data(), text.size(),
                                     "lockstep simulator: the host touched memory of cuda:%d\n"
                                     "  likely: a pointer of a CUDA tensor was used without a copy to the host\n"
                                     "  where:  the frames below, from the third on\n",
                                     device);
    (void)!::write(STDERR_FILENO, text.data(), static_cast<size_t>(length));
    std::array<void*, 32> frames{};
    ::backtrace_symbols_fd(frames.data(), ::backtrace(frames.data(), static_cast<int>(frames.size())), STDERR_FILENO);
  }
  ::signal(SIGSEGV, SIG_DFL);  // the instruction faults again
}

}  // namespace

void explain_faults() {
  static const bool kInstalled = [] {
    std::array<void*, 1> frame{};
    ::backtrace(frame.data(), 1);  // loads what it needs
    struct sigaction action {};
    action.sa_sigaction = &explain;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSEGV, &action, &earlier_action);
    return true;
  }();
  (void)kInstalled;
}

}  // namespace simulated_cuda
