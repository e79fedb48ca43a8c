#include "lockstep/collective/machines/gloo_connection.h"

#include <signal.h>

#include <cstdlib>

#include "lockstep/base/text.h"
#include "lockstep/collective/c10d/c10d_call.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::shared_ptr<gloo::transport::Device> gloo_device(const std::string& address) {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface != nullptr) return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  return c10d::ProcessGroupGloo::createDeviceForHostname(address);
}

// Gloo writes into connections that peers have closed: that is an error of the call, and no reason to end the process.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

// A receive from any rank is posted even where a peer is gone already (one from that peer would be refused at once,
// with all other connections left open), so it always runs into its timeout, which closes every connection.
void GlooConnection::close() {
  if (getSize() == 1) return;
  constexpr int kTagOfNobody = 0x7fffffff;
  std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
  try {
    issue_alone([&] { return recvAnysource(nothing, kTagOfNobody); })->wait(std::chrono::milliseconds(1));
  } catch (const std::exception&) {  // the timeout
  }
}

Gloo connect_gloo(const c10::intrusive_ptr<c10d::Store>& store, const TransportOptions& options) try {
  ignore_broken_pipes();
  auto how =
      c10d::ProcessGroupGloo::Options::create(options.timeout);  // create_default would put a loopback device first
  how->devices.push_back(gloo_device(options.address));
  auto gloo = c10::make_intrusive<GlooConnection>(with_prefix(store, "gloo"), options.rank, options.size, how);
  issue_alone([&] { return gloo->barrier(); })->wait();  // who leaves at once would disturb those who still connect
  return gloo;
} catch (const std::exception& error) {
  throw RendezvousError({.what = concat("can't connect the ranks over Gloo: ", split(error.what(), '\n').front()),
                         .here = concat(options.describe, " at ", options.address),
                         .likely = "a rank died while starting, or a firewall stands between the machines",
                         .next = "look at the other ranks' output; GLOO_SOCKET_IFNAME chooses another network"});
}

}  // namespace lockstep
