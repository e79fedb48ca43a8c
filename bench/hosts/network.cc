// SPDX-License-Identifier: Apache-2.0
#include "bench/hosts/network.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

constexpr const char* kCongestionControl = "/proc/sys/net/ipv4/tcp_congestion_control";  // new namespaces take it over

// A token bucket that holds a millisecond of the link's data (a frame at least) bridges the time until its timer
// runs; a queue of 2 MB is about what a switch has for a port.
std::string shape(const std::string& device, double megabits) {
  const int burst = std::max(4000, static_cast<int>(megabits * 1e6 / 8 * 1e-3));
  return concat("tc qdisc add dev ", device, " root tbf rate ", static_cast<std::int64_t>(megabits * 1e6), "bit burst ",
                burst, " limit 2000000\n");
}

LinkBytes read_bytes(const std::string& device) {
  std::ifstream table("/proc/thread-self/net/dev");
  for (std::string line; std::getline(table, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name != device + ":") continue;
    LinkBytes bytes;
    std::string skipped;
    words >> bytes.received;
    for (int i = 0; i < 7; ++i) words >> skipped;
    words >> bytes.sent;
    return bytes;
  }
  throw SystemError({.what = concat("no ", device, " in a host's network")});
}

}  // namespace

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

Variables Network::variables(int host, int local_rank, int ranks_per_host) const {
  constexpr int kPort = 29500;  // of a network that has nothing else in it
  return {{"RANK", concat(host * ranks_per_host + local_rank)},
          {"WORLD_SIZE", concat(hosts() * ranks_per_host)},
          {"LOCAL_RANK", concat(local_rank)},
          {"LOCAL_WORLD_SIZE", concat(ranks_per_host)},
          {"GROUP_RANK", concat(host)},
          {"MASTER_ADDR", address(0)},
          {"MASTER_PORT", concat(kPort)},
          {"OMP_NUM_THREADS", "1"}};
}

LinkBytes Network::bytes(int host) const {
  LinkBytes bytes;
  this->host(host).run([&] { bytes = read_bytes("eth0"); });
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

}  // namespace lockstep::bench
