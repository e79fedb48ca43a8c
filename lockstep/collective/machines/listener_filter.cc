// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/listener_filter.h"

#include <arpa/inet.h>
#include <linux/filter.h>

#include <cerrno>
#include <cstring>

#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr uint32_t kDrop = 0;
constexpr uint32_t kAdmit = 0xffffffff;
constexpr uint32_t kSourceAddress = static_cast<uint32_t>(SKF_NET_OFF) + 12;
constexpr uint32_t kSourcePort = 0;  // the filter sees a packet from its TCP header on

// For each source: admit the packet if it is from there, else go on with the next one.
std::vector<sock_filter> program_for(const std::vector<Endpoint>& sources) {
  std::vector<sock_filter> program;
  for (const Endpoint& source : sources) {
    in_addr address{};
    if (::inet_pton(AF_INET, source.host.c_str(), &address) != 1) continue;
    program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kSourceAddress));
    program.push_back(
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(address.s_addr), 0, static_cast<uint8_t>(source.port == 0 ? 1 : 3)));
    if (source.port != 0) {
      program.push_back(BPF_STMT(BPF_LD | BPF_H | BPF_ABS, kSourcePort));
      program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(source.port), 0, 1));
    }
    program.push_back(BPF_STMT(BPF_RET | BPF_K, kAdmit));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, kDrop));
  return program;
}

}  // namespace

void admit_only(const std::vector<Endpoint>& sources, const UniqueFd& listener) {
  auto program = program_for(sources);
  errno = E2BIG;
  const sock_fprog filter{.len = static_cast<unsigned short>(program.size()), .filter = program.data()};
  if (program.size() > BPF_MAXINSNS ||
      ::setsockopt(listener.get(), SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) != 0)
    throw SystemError(
        {.what = concat("can't admit only the job's ", sources.size(),
                        " ends of connections to a socket: ", std::strerror(errno)),
         .likely = "more ranks on other machines than the kernel has room for in one socket's filter",
         .next = "as root sysctl -w net.core.optmem_max=1048576; or, in a network that you trust, --insecure-network"});
}

}  // namespace lockstep
