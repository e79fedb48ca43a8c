// SPDX-License-Identifier: Apache-2.0
// tests/shm/support.h: ranks as threads and as processes, for the tests of the shared-memory core.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

// Sanitizers slow everything down; bounds on time are multiplied by this.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define LOCKSTEP_TEST_PATIENCE 10
#else
#define LOCKSTEP_TEST_PATIENCE 1
#endif

namespace lockstep::shm::testing {

inline Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

// What each rank threw; leaves the group in good order if it threw nothing.
inline IntVector<std::exception_ptr> run_threads(int size, const std::function<void(Group&)>& body,
                                                 const Options& options = {.timeout = std::chrono::seconds(20)}) {
  IntVector<GroupPtr> groups(make_thread_group(size, options));
  IntVector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int i = 0; i < size; ++i)
    threads.emplace_back([&, i] {
      const GroupPtr owner = std::move(groups[i]);
      Group& group = *owner;
      try {
        body(group);
        group.leave();
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void expect_none(const IntVector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& caught) {
      ADD_FAILURE() << caught.what();
    }
  }
}

// Forks; in the child runs `body` and exits with its result, or 99 after printing what it threw.
inline pid_t fork_child(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  int code = 99;
  try {
    code = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::fflush(nullptr);
  ::_exit(code);
}

inline int exit_code_of(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Ranks as processes; rank 0 is a child too. Each body's result is that rank's exit code, 128+n for a signal.
inline IntVector<pid_t> start_processes(int size, const std::function<int(Group&)>& body, RendezvousServer& server,
                                        const Options& options) {
  IntVector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank)
    pids.push_back(fork_child([&, rank] {
      const GroupPtr owner =
          rank == 0 ? server.connect(soon()) : join_rendezvous(server.address(), rank, size, soon(), options);
      Group& group = *owner;
      const int code = body(group);
      group.leave();
      return code;
    }));
  return pids;
}

inline IntVector<int> run_processes(int size, const std::function<int(Group&)>& body,
                                    const Options& options = {.timeout = std::chrono::seconds(20)}) {
  RendezvousServer server(size, options);
  IntVector<int> codes;
  for (const pid_t pid : start_processes(size, body, server, options)) codes.push_back(exit_code_of(pid));
  return codes;
}

inline ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

}  // namespace lockstep::shm::testing
