// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/meet/agent_store.h"

#include <poll.h>
#include <sys/socket.h>

#include <cstdlib>
#include <string_view>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/retry.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/meet/job_store.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// The first that c10d's client sends; a store sends the number back. (TCPStoreBackend.hpp of c10d has these values, and another
// folder in each release.)
struct [[gnu::packed]] FirstMessage {
  uint8_t validate = 0;
  uint32_t magic = 0x3C85F7CE;
  uint8_t ping = 13;
  uint32_t number = 4711;
};

// c10d's own client would wait without a deadline for a program that accepts connections and never says anything.
// Afterwards the connection is of no more use.
bool is_agent_store(const Connection& connection, const Deadline& deadline) {
  const FirstMessage message;
  uint32_t answer = 0;
  return ::send(connection.fd.get(), &message, sizeof message, MSG_NOSIGNAL) == sizeof message &&
         wait_for(POLLIN, connection.fd.get(), deadline) &&
         ::recv(connection.fd.get(), &answer, sizeof answer, 0) == sizeof answer && answer == message.number;
}

RendezvousError no_agent_store(const Endpoint& endpoint, const std::string& why) {
  return RendezvousError({.what = concat("no torchrun store at ", endpoint.text(), ": ", why),
                          .likely = "another program answers at this port, or torchrun has ended",
                          .next = "look at torchrun's output, or choose another --rdzv-endpoint"});
}

// c10d's client waits a second between attempts; this saves that second for a rank that is slightly early.
Endpoint wait_for_agent(const Endpoint& endpoint, const Deadline& deadline) {
  const AddressList addresses = resolve(endpoint, deadline);
  const char* why = "";
  const auto found = retry(deadline, kRetryEvery, [&]() -> std::optional<Endpoint> {
    const auto answered = connect_to(addresses, deadline);
    why = answered ? "what listens there does not answer as a store does" : "no answer";
    if (!answered || !is_agent_store(*answered, deadline)) return std::nullopt;
    return Endpoint{answered->address, endpoint.port};
  });
  if (!found) throw no_agent_store(endpoint, why);
  return *found;
}

}  // namespace

bool agent_serves_store() {
  const char* told = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return told != nullptr && std::string_view(told) == "True";
}

StorePtr join_agent_store(const Endpoint& endpoint, milliseconds timeout) {
  const Endpoint found = wait_for_agent(endpoint, Deadline::after(timeout));
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(found.port);
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(found.host, options);
  } catch (const std::exception& error) {
    throw no_agent_store(endpoint, first_line_of(error));
  }
}

}  // namespace lockstep
