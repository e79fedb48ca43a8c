// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using AddressBytes = std::vector<unsigned char>;  // 4 or 16

AddressBytes bytes_of(const sockaddr* address) {
  const auto copy = [](const auto& number) {
    const auto* const first = reinterpret_cast<const unsigned char*>(&number);
    return AddressBytes(first, first + sizeof number);
  };
  if (address == nullptr) return {};
  if (address->sa_family == AF_INET) return copy(reinterpret_cast<const sockaddr_in*>(address)->sin_addr);
  if (address->sa_family == AF_INET6) return copy(reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  return {};
}

AddressBytes bytes_of(const std::string& number) {
  const AddressList found = address_of_number({number});
  return found ? bytes_of(found->ai_addr) : AddressBytes();
}

struct Interface {
  std::string text;  // of its address
  AddressBytes address;
  AddressBytes mask;
};

// By GLOO_SOCKET_IFNAME, if it is set: names of interfaces with commas between them.
bool is_wanted(const std::string& name) {
  const char* wanted = std::getenv("GLOO_SOCKET_IFNAME");
  if (wanted == nullptr || *wanted == '\0') return true;
  const auto names = split(wanted, ',');
  return std::ranges::find(names, name) != names.end();
}

bool serves_others(const ifaddrs& entry) {
  if (!is_wanted(entry.ifa_name)) return false;
  if ((entry.ifa_flags & IFF_UP) == 0 || (entry.ifa_flags & IFF_LOOPBACK) != 0) return false;
  const AddressBytes address = bytes_of(entry.ifa_addr);
  const bool link_local_6 = address.size() == sizeof(in6_addr) && address[0] == 0xfe && (address[1] & 0xc0) == 0x80;
  const bool link_local_4 = address.size() == sizeof(in_addr) && address[0] == 169 && address[1] == 254;
  return !address.empty() && !link_local_4 && !link_local_6;
}

std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw system_error("list", "the network interfaces of this machine");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, &::freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next)
    if (serves_others(*entry))
      found.push_back(
          {numeric(entry->ifa_addr, sizeof(sockaddr_in6)), bytes_of(entry->ifa_addr), bytes_of(entry->ifa_netmask)});
  return found;
}

bool in_network_of(const Interface& mine, const AddressBytes& other) {
  if (other.size() != mine.address.size() || other == mine.address || mine.mask.size() != other.size()) return false;
  for (size_t i = 0; i < other.size(); ++i)
    if (((other[i] ^ mine.address[i]) & mine.mask[i]) != 0) return false;
  return true;
}

}  // namespace

std::vector<std::string> own_addresses() {
  std::vector<std::string> texts;
  for (const Interface& interface : interfaces()) texts.push_back(interface.text);
  return texts;
}

std::string address_near(const std::vector<std::string>& theirs) {
  for (const Interface& interface : interfaces())
    for (const std::string& other : theirs)
      if (in_network_of(interface, bytes_of(other))) return interface.text;
  return "";
}

std::string address_for_others() {
  constexpr std::chrono::seconds kAtOnce{1};
  const Endpoint somewhere{"192.0.2.1", 1};  // reserved for documentation; nothing is sent to it
  const auto by_route = own_address_towards(look_up(somewhere, Deadline::after(kAtOnce)).addresses);
  if (by_route && !is_loopback(*by_route)) return *by_route;
  const auto all = own_addresses();
  return all.size() == 1 ? all.front() : "";
}

}  // namespace lockstep
