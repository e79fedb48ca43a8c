// SPDX-License-Identifier: Apache-2.0
// base/old_condition_variable.cc: lets a wheel that is built with GCC 12 run beside the libstdc++ of GCC 11, as RHEL 9 has it.
//
// GCC 12 gave std::condition_variable::wait a second version that does the same and may throw where a thread is cancelled,
// which lockstep never does. All of lockstep calls the function below, which calls the first version.
#include <condition_variable>
#include <mutex>

#if defined(__x86_64__) && defined(__GLIBCXX__)

extern "C" {
void lockstep_wait_of_gcc_11(std::condition_variable*, std::unique_lock<std::mutex>*);
__asm__(".symver lockstep_wait_of_gcc_11, _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

[[gnu::visibility("hidden")]] void lockstep_wait(std::condition_variable* variable, std::unique_lock<std::mutex>* lock) __asm__(
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void lockstep_wait(std::condition_variable* variable, std::unique_lock<std::mutex>* lock) {
  lockstep_wait_of_gcc_11(variable, lock);
}
}

#endif
