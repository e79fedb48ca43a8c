#include "bench/hosts/network_namespace.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>

#include <cerrno>
#include <chrono>
#include <future>

#include "bench/child.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/launch/process.h"

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

int execute_shell(const std::string& script) {
  ::execl("/bin/sh", "sh", "-ec", script.c_str(), nullptr);
  throw system_error("start", "/bin/sh");
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

void NetworkNamespace::shell(const std::string& script) const {
  ProcessOptions options;
  options.body = [&] {
    enter();
    return execute_shell(script);
  };
  ::sigemptyset(&options.signal_mask);
  require_good_end(Process(options), "setting up a network (ip and tc, of Debian's iproute2)", kLongestScript);
}

std::string NetworkNamespace::path() const { return concat("/proc/", ::getpid(), "/fd/", fd_.get()); }

}  // namespace lockstep::bench
