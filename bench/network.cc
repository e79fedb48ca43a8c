// SPDX-License-Identifier: Apache-2.0
#include "bench/network.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>

#include "bench/tcp.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

constexpr const char* kCongestionControl = "/proc/sys/net/ipv4/tcp_congestion_control";  // new namespaces take it over

// A token bucket that holds a millisecond of the link's data (a frame at least) bridges the time until its timer
// runs; a queue of 2 MB is about what a switch has for a port.
std::string shape(const std::string& device, double megabits) {
  const int burst = std::max(4000, static_cast<int>(megabits * 1e6 / 8 * 1e-3));
  return concat("tc qdisc add dev ", device, " root tbf rate ", static_cast<int64_t>(megabits * 1e6), "bit burst ",
                burst, " limit 2000000\n");
}

// What has left `device` of the calling thread's network.
double bytes_sent(const std::string& device) {
  const std::string command = concat("tc -s -j qdisc show dev ", device);
  const std::unique_ptr<FILE, int (*)(FILE*)> output(::popen(command.c_str(), "r"), ::pclose);
  std::string text;
  std::array<char, 4096> buffer{};
  while (output && std::fgets(buffer.data(), buffer.size(), output.get()) != nullptr) text += buffer.data();
  const Json found = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (found.is_array() && !found.empty() && found[0].contains("bytes")) return found[0]["bytes"].get<double>();
  throw SystemError({.what = concat("`", command, "` (of Debian's iproute2) tells no bytes: ", text)});
}

void on_a_thread(const std::function<void()>& body) { std::async(std::launch::async, body).get(); }

void require_made(int result) {
  if (result == 0) return;
  if (errno != EPERM) throw system_error("make", "a network namespace");
  throw SystemError({.what = "a network namespace may be made by root only",
                     .next =
                         "run it as root, or as the root of a user namespace: unshare --user --map-root-user lockstep "
                         "bench ..."});
}

constexpr std::chrono::milliseconds kWarmUp{300};
constexpr std::chrono::milliseconds kMeasured{1000};

TcpConnection connect(const Network& network, int from, int to) {
  const auto in = [&](int host) { return [&network, host](const auto& body) { network.host(host).run(body); }; };
  return connect_over_tcp(network.address(to), in(from), in(to));
}

void send_until(const UniqueFd& socket, Deadline end) {
  const std::vector<char> data(size_t{256} << 10);
  while (!end.passed()) require_measured(::send(socket.get(), data.data(), data.size(), MSG_NOSIGNAL) > 0);
  ::shutdown(socket.get(), SHUT_WR);
}

// Bytes per second after the warm-up, when TCP has found its window.
double receive_to_end(const UniqueFd& socket) {
  std::vector<char> data(size_t{256} << 10);
  const Deadline warm = Deadline::after(kWarmUp);
  while (!warm.passed()) require_measured(::recv(socket.get(), data.data(), data.size(), 0) > 0);
  const Stopwatch watch;
  double bytes = 0;
  for (ssize_t got = 1; got > 0; bytes += static_cast<double>(got)) {
    got = ::recv(socket.get(), data.data(), data.size(), 0);
    require_measured(got >= 0);
  }
  return bytes / watch.seconds();
}

// Bytes of data per second of the slower direction.
double send_both_ways(const std::array<TcpConnection, 2>& directions, std::chrono::milliseconds time) {
  std::vector<std::future<void>> senders;
  std::vector<std::future<double>> receivers;
  const Deadline end = Deadline::after(kWarmUp + time);
  for (const TcpConnection& one : directions) {
    senders.push_back(std::async(std::launch::async, [&one, end] { send_until(one.from, end); }));
    receivers.push_back(std::async(std::launch::async, [&one] { return receive_to_end(one.to); }));
  }
  for (auto& sender : senders) sender.get();
  const double there = receivers[0].get();
  return std::min(there, receivers[1].get());
}

std::array<TcpConnection, 2> both_directions(const Network& network) {
  return {connect(network, 0, 1), connect(network, 1, 0)};
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
  run([&] {
    if (std::system(concat("set -e\n", script).c_str()) != 0)
      throw SystemError({.what = "setting up a network failed (ip and tc, of Debian's iproute2)",
                         .likely = "its own message is above"});
  });
}

std::string NetworkNamespace::path() const { return concat("/proc/", ::getpid(), "/fd/", fd_.get()); }

Network::Network(int hosts, const LinkOptions& options) : options_(options) {
  switch_.shell("ip link add bridge type bridge\nip link set bridge up\n");
  for (int host = 0; host < hosts; ++host) {
    hosts_.emplace_back();
    connect(host);
  }
}

void Network::connect(int host) const {
  const std::string port = concat("port", host);
  switch_.shell(concat("ip link add ", port, " type veth peer name eth0 netns ", this->host(host).path(), "\n",
                       "ip link set ", port, " master bridge up\n", shape(port, options_.megabits_per_second)));
  this->host(host).shell(concat("ip link set lo up\nip address add ", address(host), "/16 dev eth0\n",
                                "ip link set eth0 up\n", shape("eth0", options_.megabits_per_second)));
  if (!options_.congestion_control.empty())
    this->host(host).shell(concat("echo ", options_.congestion_control, " > ", kCongestionControl));
}

std::string Network::address(int host) const { return concat("10.77.0.", host + 1); }

Variables launcher_variables(const RankPlace& place) {
  return {{"RANK", concat(place.host * place.ranks_per_host + place.local_rank)},
          {"WORLD_SIZE", concat(place.hosts * place.ranks_per_host)},
          {"LOCAL_RANK", concat(place.local_rank)},
          {"LOCAL_WORLD_SIZE", concat(place.ranks_per_host)},
          {"GROUP_RANK", concat(place.host)},
          {"MASTER_ADDR", place.address},
          {"MASTER_PORT", concat(place.port)},
          {"OMP_NUM_THREADS", "1"}};
}

Variables Network::variables(int host, int local_rank, int ranks_per_host) const {
  constexpr int kPort = 29500;  // of a network that has nothing else in it
  return launcher_variables({host, hosts(), local_rank, ranks_per_host, address(0), kPort});
}

LinkBytes Network::bytes(int host) const {
  LinkBytes bytes;
  this->host(host).run([&] { bytes.sent = bytes_sent("eth0"); });
  switch_.run([&] { bytes.received = bytes_sent(concat("port", host)); });
  return bytes;
}

std::string congestion_control(const LinkOptions& options) {
  if (!options.congestion_control.empty()) return options.congestion_control;
  return split(read_file(kCongestionControl), '\n').front();
}

void add_link_options(Program& program, LinkOptions& link) {
  program.option("--rate", link.megabits_per_second, "of every link, Mb/s in each direction");
  program.option("--congestion-control", link.congestion_control,
                 "of TCP: bbr, cubic, reno; this machine's by default");
}

// What TCP gets through a link: the rate less the headers, and less what shaping costs.
double measured_bytes_per_second(const Network& network) { return send_both_ways(both_directions(network), kMeasured); }

double measured_work_of_byte(const Network& network) {
  constexpr std::chrono::milliseconds kFor{2000};  // /proc/stat counts hundredths of a second
  const auto carried = [&] { return network.bytes(0).sent + network.bytes(1).sent; };
  const double idle = busy_seconds_of_cores(), none = carried();
  send_both_ways(both_directions(network), kFor);
  const double through_links = (busy_seconds_of_cores() - idle) / (carried() - none);
  const double before = busy_seconds_of_cores();
  const std::chrono::duration<double> seconds = kWarmUp + kMeasured;
  const double loopback =
      2 * send_both_ways({connect_on_loopback(), connect_on_loopback()}, kMeasured) * seconds.count();
  return std::max(0.0, through_links - (busy_seconds_of_cores() - before) / loopback);
}

double measured_latency(const Network& network) {
  return std::max(0.0, (round_trip(connect(network, 0, 1)) - loopback_round_trip()) / 2);
}

}  // namespace lockstep::bench
