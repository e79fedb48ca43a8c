// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/job_store.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>

#include <c10/util/Logging.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStoreBackend.hpp>

#include "lockstep/base/log.h"
#include "lockstep/base/poll.h"
#include "lockstep/base/port.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kResolveEvery{200};

RendezvousError cannot_resolve(const Endpoint& endpoint, const std::string& why) {
  return RendezvousError({.what = concat("can't resolve MASTER_ADDR=", endpoint.host, ": ", why),
                          .likely = "a name that this machine does not know, or a name server that does not answer",
                          .next = "set MASTER_ADDR to rank 0's address or to a name in /etc/hosts or DNS"});
}

RendezvousError cannot_listen(const Endpoint& endpoint) {
  const bool in_use = errno == EADDRINUSE;
  return RendezvousError(
      {.what = concat("rank 0 can't listen on ", endpoint.text(), ": ", std::strerror(errno)),
       .here = concat("MASTER_ADDR=", endpoint.host, " MASTER_PORT=", endpoint.port),
       .peer = in_use ? listener_of_port(endpoint.port) : "",
       .likely = in_use ? "another job, or an old one that is still running, uses this port"
                        : "MASTER_ADDR is not an address of the machine that runs rank 0",
       .next = in_use ? "choose another MASTER_PORT, or leave it out on one machine: a free one is found"
                      : "set MASTER_ADDR to rank 0's machine on every rank"});
}

RendezvousError no_store(const Endpoint& endpoint, const std::string& why) {
  return RendezvousError({.what = concat("no store at ", endpoint.text(), ": ", why),
                          .likely = "another program answers at this port, or rank 0 died",
                          .next = "look at rank 0's output, or choose another MASTER_PORT"});
}

// The first that c10d's client sends; a store sends the number back.
struct [[gnu::packed]] FirstMessage {
  c10d::detail::QueryType validate = c10d::detail::QueryType::VALIDATE;
  std::uint32_t magic = c10d::detail::validationMagicNumber;
  c10d::detail::QueryType ping = c10d::detail::QueryType::PING;
  std::uint32_t number = 4711;
};

// c10d's client waits a second between attempts; this saves that second for a rank that is slightly early.
Endpoint wait_for_answer(const Endpoint& endpoint, const JobEnvironment& job, const Deadline& deadline) {
  const AddressList addresses = resolve(endpoint, deadline);
  for (;;) {
    const auto answered = connect_to(addresses, deadline);
    if (answered && is_store(*answered, deadline)) return {answered->address, endpoint.port};
    if (deadline.passed() && answered) throw no_store(endpoint, "what listens there does not answer as a store does");
    if (deadline.passed())
      throw RendezvousError({.what = concat("rank ", job.rank, " found nobody at ", endpoint.text()),
                             .likely = "rank 0 did not start, died early, or has another MASTER_ADDR or MASTER_PORT",
                             .next = "look at rank 0's output; `lockstep env` shows what each rank was told"});
    std::this_thread::sleep_for(kRetryEvery);
  }
}

// c10d warns on each rank of an address that has no name, which nothing here needs. Its other warnings come again in the
// errors that follow. One at a time: the level is the process's.
class WithoutWarnings {
 public:
  WithoutWarnings() { FLAGS_caffe2_log_level = std::max(level_, c10::GLOG_ERROR); }
  ~WithoutWarnings() { FLAGS_caffe2_log_level = level_; }

 private:
  static inline std::mutex one_at_a_time_;
  std::lock_guard<std::mutex> lock_{one_at_a_time_};
  int level_ = FLAGS_caffe2_log_level;
};

// The store at `endpoint`, whose host is a number; served here where there is a listener.
c10::intrusive_ptr<c10d::Store> make_store(const Endpoint& endpoint, milliseconds timeout, UniqueFd listener = {}) try {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(endpoint.port);
  options.isServer = static_cast<bool>(listener);
  options.waitWorkers = false;
  options.timeout = timeout;
  if (listener) options.masterListenFd = listener.release();
  const WithoutWarnings quiet;
  return c10::make_intrusive<c10d::TCPStore>(endpoint.host, options);
} catch (const std::exception& error) {
  throw no_store(endpoint, split(error.what(), '\n').front());
}

}  // namespace

bool is_store(const Connection& connection, const Deadline& deadline) {
  const FirstMessage message;
  std::uint32_t answer = 0;
  return ::send(connection.fd.get(), &message, sizeof message, MSG_NOSIGNAL) == sizeof message &&
         wait_for(POLLIN, connection.fd.get(), deadline) &&
         ::recv(connection.fd.get(), &answer, sizeof answer, 0) == sizeof answer && answer == message.number;
}

AddressList resolve(const Endpoint& endpoint, const Deadline& deadline, int socket_type) {
  for (bool told = false;; told = true) {
    auto [failed, addresses] = look_up(endpoint, deadline, socket_type);
    if (failed == 0) return std::move(addresses);
    if (failed == EAI_INPROGRESS) throw cannot_resolve(endpoint, "no answer before the deadline");
    const bool may_come = failed == EAI_AGAIN || failed == EAI_NONAME || failed == EAI_NODATA;
    if (!may_come || deadline.passed()) throw cannot_resolve(endpoint, ::gai_strerror(failed));
    if (!told) log_warning(concat("MASTER_ADDR=", endpoint.host, ": ", ::gai_strerror(failed), "; trying again"));
    std::this_thread::sleep_for(std::min(kResolveEvery, deadline.left()));
  }
}

UniqueFd listen_on(const Endpoint& endpoint, const Deadline& deadline, int ports) {
  const AddressList addresses = resolve(endpoint, deadline);
  for (int port = endpoint.port; port < endpoint.port + ports; ++port) {
    set_port(addresses, port);
    if (UniqueFd fd = listen_at(addresses)) return fd;
    if (errno != EADDRINUSE) break;
  }
  throw cannot_listen(endpoint);
}

c10::intrusive_ptr<c10d::Store> join_store(const Endpoint& endpoint, const JobEnvironment& job, milliseconds timeout) {
  return make_store(wait_for_answer(endpoint, job, Deadline::after(timeout)), timeout);
}

c10::intrusive_ptr<c10d::Store> serve_store(UniqueFd listener, milliseconds timeout) {
  const Endpoint endpoint = endpoint_of(listener);  // before the listener moves
  return make_store(endpoint, timeout, std::move(listener));
}

c10::intrusive_ptr<c10d::Store> store_at(const Endpoint& endpoint, milliseconds timeout) {
  return make_store(endpoint, timeout);
}

std::string text_in(c10d::Store& store, const std::string& key) try {
  const auto bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
} catch (const std::exception& error) {
  throw RendezvousError(
      {.what = concat("no ", key, " in the store at MASTER_PORT: ", split(error.what(), '\n').front()),
       .likely = "the store of another program, or rank 0 died",
       .next = "look at rank 0's output, or choose another MASTER_PORT"});
}

}  // namespace lockstep
