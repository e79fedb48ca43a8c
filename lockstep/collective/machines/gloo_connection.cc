// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/gloo_connection.h"

#include <signal.h>

#include "lockstep/base/text.h"
#include "lockstep/collective/c10d/c10d_call.h"
#include "lockstep/collective/machines/gloo_network.h"

namespace lockstep {
namespace {

// Gloo writes into connections that peers have closed: that must be an error of the call, not the end of the process.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

// c10d has no call for this, but a receive that runs into its timeout closes every connection. It must be a receive from
// any rank: Gloo refuses one from a rank whose connection is closed already at once, and then closes nothing.
void GlooConnection::close() {
  if (getSize() == 1) return;
  constexpr int kUnusedTag = 0x7fffffff;
  std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
  try {
    issue_alone([&] { return recvAnysource(nothing, kUnusedTag); })->wait(milliseconds(1));
  } catch (const std::exception&) {  // the timeout
  }
}

Gloo connect_gloo(const StorePtr& store, const TransportOptions& options) try {
  ignore_broken_pipes();
  // Not create_default: that would put a loopback device first.
  auto gloo_options = c10d::ProcessGroupGloo::Options::create(options.timeout);
  const auto network = options.network ? options.network : join_gloo_network(*store, options);
  Gloo gloo;
  connect_through(*network, *store, options, [&](const GlooDevice& device) {
    gloo_options->devices.push_back(device);
    gloo = c10::make_intrusive<GlooConnection>(with_prefix(store, "gloo"), options, gloo_options, network);
    issue_alone([&] {
      return gloo->barrier();
    })->wait();  // a rank that leaves at once would disturb others' connecting
  });
  return gloo;
} catch (const Error&) {
  throw;
} catch (const std::exception& error) {
  throw RendezvousError({.what = concat("can't connect the ranks over Gloo: ", first_line_of(error)),
                         .here = concat(options.describe, " at ", options.address),
                         .likely = "a rank died while starting, or a firewall stands between the machines",
                         .next = "look at the other ranks' output; GLOO_SOCKET_IFNAME chooses another network"});
}

}  // namespace lockstep
