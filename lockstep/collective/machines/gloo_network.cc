// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/gloo_network.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>

#include <cstdlib>
#include <random>

#include "agent/meet/interfaces.h"
#include "agent/meet/job_secret.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/process/short_slices.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/collective/c10d/c10d_call.h"
#include "lockstep/collective/machines/listener_filter.h"
#include "lockstep/collective/machines/topology.h"
#include "lockstep/collective/machines/tunnel.h"
#include "lockstep/collective/transport/cpu_transport.h"
#include "lockstep/cores.h"

namespace lockstep {
namespace {

using GlooDevice = std::shared_ptr<gloo::transport::Device>;

constexpr std::string_view kInsecure = "insecure";
constexpr uint32_t kFirstLoopback = 0x7f400000;  // 127.64.0.0/10
constexpr uint32_t kLoopbacks = 1U << 22U;
constexpr int kMostTries = 8;  // to find ports that are free on all machines

using Texts = std::vector<std::string>;

// ---- Who takes part

// The same for processes that reach each other on the loopback interface.
std::string network_namespace() {
  return concat(split(read_file("/proc/sys/kernel/random/boot_id"), '\n').front(),
                std::filesystem::read_symlink("/proc/self/ns/net").string());
}

std::string interface_that_is_named() {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  return interface == nullptr ? "" : interface;
}

// Exchanges what each rank says of itself before they connect.
Texts exchange_alike(c10d::Store& store, const std::string& mine, const TransportOptions& options) {
  Texts texts = exchange_texts(store, "gloo", mine, options);
  for (size_t rank = 0; rank < texts.size(); ++rank)
    if ((texts[rank] == kInsecure) != (mine == kInsecure))
      throw RendezvousError(
          {.what = concat("rank ", rank, texts[rank] == kInsecure ? " runs" : " does not run",
                          " with --insecure-network, and this rank ", mine == kInsecure ? "does" : "does not"),
           .here = options.describe,
           .likely = "LOCKSTEP_INSECURE_NETWORK or --insecure-network on some of the machines only",
           .next = "set it on all or on none"});
  return texts;
}

RendezvousError wrong_text(const TransportOptions& options) {
  return RendezvousError({.what = "a rank sent malformed addresses",
                          .here = options.describe,
                          .likely = "another version of lockstep on a machine",
                          .next = "install the same one on all"});
}

RendezvousError could_not_connect(const std::string& what, const TransportOptions& options) {
  return RendezvousError(
      {.what = what,
       .here = concat(options.describe, " at ", options.address),
       .likely = "a firewall between the machines, a rank that died while starting, or another program that answers",
       .next = "look at the other ranks' output; GLOO_SOCKET_IFNAME chooses another network"});
}

template <class Number>
Number number_in(const std::string& text, const TransportOptions& options) {
  Number number{};
  if (!parse_int(text, number)) throw wrong_text(options);
  return number;
}

Endpoint sent_endpoint(const std::string& text, const TransportOptions& options) {
  if (auto endpoint = endpoint_in(text)) return *endpoint;
  throw wrong_text(options);
}

// ---- Listeners

// Calls use(descriptor, own end) for the sockets of this process that listen at an address of IPv4, or are connected there.
template <class Use>
void for_sockets_at(const std::string& host, bool listen, const Use& use) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const std::string name = entry.path().filename();
    int fd = -1, listens = 0;
    parse_int(name, fd);
    socklen_t length = sizeof listens;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || (listens != 0) != listen) continue;
    sockaddr_storage own{};
    length = sizeof own;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0 || own.ss_family != AF_INET) continue;
    const Endpoint endpoint{numeric(reinterpret_cast<sockaddr*>(&own), length),
                            ntohs(reinterpret_cast<sockaddr_in&>(own).sin_port)};
    if (endpoint.host == host) use(fd, endpoint);
  }
}

std::map<int, int> listeners_at(const std::string& host) {  // descriptors by port
  std::map<int, int> found;
  for_sockets_at(host, true, [&](int fd, const Endpoint& own) { found[own.port] = fd; });
  return found;
}

// A device of Gloo on the loopback interface, which several connections share.
class GlooListener {
 public:
  // Gloo does not say at which port it listens: it is the one that was not there before.
  explicit GlooListener(const std::string& host) {
    static std::mutex making;
    const std::lock_guard lock(making);
    const auto before = listeners_at(host);
    device_ = with_short_slices([&] { return c10d::ProcessGroupGloo::createDeviceForHostname(host); });
    for (const auto& [port, fd] : listeners_at(host))
      if (!before.contains(port)) {
        endpoint_ = {host, port};
        socket_.reset(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
      }
    if (!socket_)
      throw SystemError(
          {.what = concat("can't find the socket at which Gloo listens, at ", host), .here = "/proc/self/fd"});
    admit_only({}, socket_);
  }

  const GlooDevice& device() const { return device_; }
  const Endpoint& endpoint() const { return endpoint_; }

  void admit(const std::vector<Endpoint>& sources) {
    const std::lock_guard lock(mutex_);
    std::vector<Endpoint> all = sources_;
    all.insert(all.end(), sources.begin(), sources.end());
    admit_only(all, socket_);
    sources_ = std::move(all);
  }

  void admit_no_more(const std::vector<Endpoint>& sources) {
    const std::lock_guard lock(mutex_);
    for (const Endpoint& source : sources)
      sources_.erase(std::ranges::find_if(sources_, [&](const Endpoint& one) { return one.text() == source.text(); }));
    admit_only(sources_, socket_);
  }

 private:
  GlooDevice device_;
  Endpoint endpoint_;
  UniqueFd socket_;
  std::mutex mutex_;
  std::vector<Endpoint> sources_;  // of all connections that are being made
};

// Lets these in while what is returned lives.
std::shared_ptr<void> admission(const std::shared_ptr<GlooListener>& listener, const std::vector<Endpoint>& sources) {
  listener->admit(sources);
  return {nullptr, [listener, sources](void*) {
            try {
              listener->admit_no_more(sources);
            } catch (const std::exception&) {  // those can still connect that could before
            }
          }};
}

}  // namespace

class GlooNetwork {
 public:
  GlooNetwork(c10d::Store& store, const TransportOptions& options) {
    if (network_is_insecure()) {
      exchange_alike(store, std::string(kInsecure), options);
      return;
    }
    auto identity = std::make_shared<TlsIdentity>();
    const Texts texts = exchange_alike(
        store, concat(network_namespace(), ' ', identity->fingerprint(), ' ', std::random_device()()), options);
    std::set<std::string> fingerprints;
    std::vector<std::string> spaces;
    for (const std::string& text : texts) {
      const auto words = split(text, ' ');
      if (words.size() != 3) throw wrong_text(options);
      spaces.push_back(words[0]);
      fingerprints.insert(words[1]);
    }
    const auto first = number_in<uint32_t>(split(texts.front(), ' ')[2], options);
    const auto machine = static_cast<uint32_t>(number_by_first_appearance(spaces)[to_size(options.rank)]);
    in_addr address{.s_addr = htonl(kFirstLoopback + (first + machine) % kLoopbacks)};
    std::array<char, INET_ADDRSTRLEN> text{};
    host_ = ::inet_ntop(AF_INET, &address, text.data(), text.size());
    identity->trust(std::move(fingerprints));
    identity_ = std::move(identity);
  }

  bool is_secure() const { return identity_ != nullptr; }
  const std::shared_ptr<const TlsIdentity>& identity() const { return identity_; }
  const std::string& host() const { return host_; }  // of this machine, on the loopback interface

  // One of those that there are, or another one while there are fewer than cores. See Note [Shared listeners].
  template <class Listener, class Make>
  Listener next(std::vector<Listener>& those, const Make& make) {
    const std::lock_guard lock(mutex_);
    const size_t next = taken_++ % std::max<size_t>(1, usable_cores().size());
    if (next >= those.size()) return those.emplace_back(make());
    return those[next];
  }

  std::shared_ptr<GlooListener> next_listener() {
    return next(listeners_, [&] { return std::make_shared<GlooListener>(host_); });
  }
  GlooDevice next_device(const TransportOptions& options) {
    return next(devices_, [&] {
      const std::string interface = interface_that_is_named();
      return with_short_slices([&] {
        return interface.empty() ? c10d::ProcessGroupGloo::createDeviceForHostname(options.address)
                                 : c10d::ProcessGroupGloo::createDeviceForInterface(interface);
      });
    });
  }

  std::shared_ptr<GlooListener> replace(const std::shared_ptr<GlooListener>& listener) {
    const std::lock_guard lock(mutex_);
    std::erase(listeners_, listener);
    return listeners_.emplace_back(std::make_shared<GlooListener>(host_));
  }

 private:
  std::shared_ptr<const TlsIdentity> identity_;  // none: an insecure network
  std::string host_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<GlooListener>> listeners_;
  std::vector<GlooDevice> devices_;  // of an insecure network
  size_t taken_ = 0;                 // so often one of them was
};

namespace {

// Gloo writes into connections that peers have closed: that must be an error of the call, not the end of the process.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

// Lets the ranks in while it lives. All make it at the same time, in steps that each end with an exchange.
class Entrance {
 public:
  Entrance(GlooNetwork& network, c10d::Store& store, const TransportOptions& options)
      : network_(network), store_(store), options_(options), listener_(network.next_listener()) {
    while (!find_ports_that_are_free_everywhere())
      if (++tries_ == kMostTries)
        throw RendezvousError(
            {.what = concat("no port of the loopback interface is free on all machines, tried ", kMostTries),
             .here = options.describe,
             .likely = "programs that listen at most ports of a machine"});
    admission_ = admission(listener_, sources_);
    const std::string failure = start_tunnel();
    for (const std::string& text : exchange("tunnel", failure))
      if (!text.empty()) throw could_not_connect(text, options_);
  }

  const GlooDevice& device() const { return listener_->device(); }

  // While they connected, a process of another user could from this machine, too.
  void require_own_users() const {
    for_sockets_at(network_.host(), false, [&](int fd, const Endpoint& own) {
      if (own.port != listener_->endpoint().port) return;
      const auto user = user_of_other_end(fd);
      if (user && *user != 0 && *user != ::geteuid())
        throw could_not_connect("a process of another user has connected to Gloo at " + own.text(), options_);
    });
  }

 private:
  Texts exchange(const std::string& topic, const std::string& mine) const {
    return exchange_texts(store_, concat("gloo ", topic, ' ', tries_), mine, options_);
  }

  bool is_here(const Endpoint& gloo) const { return gloo.host == network_.host(); }

  // The first rank of each machine makes its tunnel.
  bool find_ports_that_are_free_everywhere() {
    listening_.clear();
    here_.clear();
    for (const std::string& text : exchange("port", listener_->endpoint().text())) {
      listening_.push_back(sent_endpoint(text, options_));
      if (is_here(listening_.back())) here_.push_back(listening_.back());
    }
    tunnel_.reset();
    const bool is_first = here_.front().port == listener_->endpoint().port;
    return all_are_free(exchange("sources", is_first ? make_tunnel() : ""));
  }

  // Returns its endpoint and ports, and of which ranks the port is taken here.
  std::string make_tunnel() {
    const size_t others = listening_.size() - here_.size();
    if (others == 0) return "";
    const Texts named = interface_that_is_named().empty() ? Texts() : own_addresses();
    tunnel_.emplace(network_.identity(), named.empty() ? options_.address : named.front(), network_.host(),
                    to_int(others));
    Texts taken, ports;
    for (size_t rank = 0; rank < listening_.size(); ++rank)
      if (!is_here(listening_[rank]) && !tunnel_->listen_for(listening_[rank])) taken.push_back(concat(rank));
    for (const int port : tunnel_->sources()) ports.push_back(concat(port));
    return concat(tunnel_->endpoint().text(), ' ', join(ports, ","), ' ', join(taken, ","));
  }

  bool all_are_free(const Texts& told) {
    sources_.clear();
    tunnels_.clear();
    std::set<std::string> taken;
    for (size_t rank = 0; rank < told.size(); ++rank) {
      if (told[rank].empty()) continue;
      const auto words = split(told[rank], ' ');
      if (words.size() != 3) throw wrong_text(options_);
      tunnels_[listening_[rank].host] = {to_int(rank), sent_endpoint(words[0], options_)};
      for (const std::string& port : split(words[1], ','))
        if (is_here(listening_[rank])) sources_.push_back({network_.host(), number_in<uint16_t>(port, options_)});
      for (const std::string& one : split(words[2], ',')) taken.insert(one);
    }
    taken.erase("");
    if (taken.contains(concat(options_.rank))) listener_ = network_.replace(listener_);
    // Ranks on "machines" in one network namespace connect by themselves.
    if (here_.size() > 1) sources_.push_back({"127.0.0.1", 0});
    return taken.empty();
  }

  // "": every other machine's tunnel answers.
  std::string start_tunnel() {
    if (!tunnel_) return "";
    std::map<std::string, Endpoint> tunnels;
    for (const auto& [host, tunnel] : tunnels_) tunnels[host] = tunnel.second;
    tunnel_->start(here_, tunnels);
    const Deadline deadline = Deadline::after(options_.timeout * 3 / 4);  // before others give this rank up
    for (const auto& [host, tunnel] : tunnels_) {
      if (host == network_.host()) continue;
      const std::string why = tunnel_->try_to_reach(tunnel.second, deadline);
      if (!why.empty()) return concat("can't connect to rank ", tunnel.first, " at ", tunnel.second.text(), ": ", why);
    }
    return "";
  }

  GlooNetwork& network_;
  c10d::Store& store_;
  TransportOptions options_;
  int tries_ = 0;
  std::shared_ptr<GlooListener> listener_;
  std::vector<Endpoint> listening_;                          // Gloo, of each rank
  std::vector<Endpoint> here_;                               // those on this machine
  std::vector<Endpoint> sources_;                            // from which it is connected to here
  std::map<std::string, std::pair<int, Endpoint>> tunnels_;  // of each machine: its rank and where it listens
  std::optional<Tunnel> tunnel_;
  std::shared_ptr<void> admission_;
};

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
  const auto network = options.network ? options.network : std::make_shared<GlooNetwork>(*store, options);
  std::optional<Entrance> entrance;  // which closes when all have met
  if (network->is_secure()) entrance.emplace(*network, *store, options);
  gloo_options->devices.push_back(entrance ? entrance->device() : network->next_device(options));
  auto gloo = c10::make_intrusive<GlooConnection>(with_prefix(store, "gloo"), options, gloo_options, network);
  issue_alone([&] { return gloo->barrier(); })->wait();  // a rank that leaves at once would disturb others' connecting
  if (entrance) entrance->require_own_users();
  return gloo;
} catch (const Error&) {
  throw;
} catch (const std::exception& error) {
  throw could_not_connect(concat("can't connect the ranks over Gloo: ", first_line_of(error)), options);
}

}  // namespace lockstep
