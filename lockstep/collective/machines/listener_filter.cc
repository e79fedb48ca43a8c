// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/listener_filter.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <set>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Words = std::vector<std::uint32_t>;  // of an address: 1 or 4

constexpr std::uint32_t kDrop = 0;
constexpr std::uint32_t kAdmit = 0xffffffff;

bool listens_at(int fd, const sockaddr_storage& address) {
  int listens = 0;
  socklen_t length = sizeof listens;
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0) return false;
  sockaddr_storage own{};
  length = sizeof own;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 && std::memcmp(&own, &address, length) == 0;
}

Words words_of(int family, const std::string& address) {
  Words words(family == AF_INET ? 1 : 4);
  const std::string number = split(address, '%').front();  // without a scope
  if (::inet_pton(family, number.c_str(), words.data()) != 1) return {};
  for (std::uint32_t& word : words) word = ntohl(word);
  return words;
}

// Offset of the sender's address in a packet of that family.
std::uint32_t source_offset(int family) {
  return static_cast<std::uint32_t>(SKF_NET_OFF) + (family == AF_INET ? 12 : 8);
}

// For each address: admit the packet if all words are equal, else go on with the next address.
std::vector<sock_filter> program_for(int family, const std::set<Words>& addresses) {
  std::vector<sock_filter> program;
  for (const Words& words : addresses) {
    for (std::size_t i = 0; i < words.size(); ++i) {
      const auto left = static_cast<std::uint8_t>(2 * (words.size() - i - 1) + 1);
      program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(source_offset(family) + 4 * i)));
      program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, words[i], 0, left));
    }
    program.push_back(BPF_STMT(BPF_RET | BPF_K, kAdmit));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, kDrop));
  return program;
}

}  // namespace

ListenerFilter::ListenerFilter(const sockaddr_storage& address) : family_(address.ss_family) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const std::string name = entry.path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    if (fd < 0 || !listens_at(fd, address)) continue;
    listener_.reset(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    return;
  }
  throw SystemError({.what = "can't find the socket at which Gloo listens", .here = "/proc/self/fd"});
}

void ListenerFilter::admit_only(const std::vector<std::string>& addresses) const {
  std::set<Words> numbers;
  for (const std::string& address : addresses)
    if (Words words = words_of(family_, address); !words.empty()) numbers.insert(std::move(words));
  auto program = program_for(family_, numbers);
  errno = E2BIG;
  const sock_fprog filter{.len = static_cast<unsigned short>(program.size()), .filter = program.data()};
  if (program.size() > BPF_MAXINSNS ||
      ::setsockopt(listener_.get(), SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) != 0)
    throw SystemError(
        {.what =
             concat("can't admit only the job's ", numbers.size(), " addresses to a socket: ", std::strerror(errno)),
         .likely = "more addresses than the kernel has room for in one socket's filter: those of all "
                   "interfaces of all machines count, also of containers' bridges",
         .next = "GLOO_SOCKET_IFNAME on all machines, so that only its addresses count; or as root sysctl -w "
                 "net.core.optmem_max=1048576; or, in a network that you trust, --insecure-network"});
}

}  // namespace lockstep
