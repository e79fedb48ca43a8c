// SPDX-License-Identifier: Apache-2.0
#include "bench/hosts/network_namespace.h"

#include <fcntl.h>
#include <sched.h>

#include <cerrno>
#include <chrono>
#include <future>

#include "bench/processes.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

constexpr std::chrono::seconds kLongestScript{30};

void on_a_thread(const std::function<void()>& body) { std::async(std::launch::async, body).get(); }

void require_made(int result) {
  if (result == 0) return;
  if (errno != EPERM) throw system_error("make", "a network namespace");
  throw SystemError({.what = "a network namespace may be made by root only",
                     .next =
                         "run it as root, or as the root of a user namespace: unshare --user --map-root-user lockstep "
                         "bench ..."});
}

}  // namespace

// The thread that makes it goes back to no other: it ends.
NetworkNamespace::NetworkNamespace() {
  on_a_thread([this] {
    require_made(::unshare(CLONE_NEWNET));
    fd_.reset(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    if (!fd_) throw system_error("open", "a network namespace");
  });
}

void NetworkNamespace::enter() const {
  if (::setns(fd_.get(), CLONE_NEWNET) != 0) throw system_error("enter", "a network namespace");
}

void NetworkNamespace::run(const std::function<void()>& body) const {
  on_a_thread([&] {
    enter();
    body();
  });
}

ProcessOptions NetworkNamespace::inside(const std::vector<std::string>& command) const {
  ProcessOptions options;
  options.body = [this, command]() -> int {
    enter();
    replace_by(command);
  };
  return options;
}

void NetworkNamespace::shell(const std::string& script) const {
  run_to_its_end(inside({"/bin/sh", "-ec", script}), "setting up a network (ip and tc, of Debian's iproute2)",
                 kLongestScript);
}

std::string NetworkNamespace::path() const { return concat("/proc/", ::getpid(), "/fd/", fd_.get()); }

}  // namespace lockstep::bench
