// SPDX-License-Identifier: Apache-2.0
#include "agent/recover/keeper.h"

#include <unistd.h>

#include <algorithm>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

// A rank takes an answer at once, unless it was stopped; then the launcher does not wait for it.
constexpr milliseconds kToTakeAnswer{200};

int seat_in(const Packet& packet) {
  int seat = -1;
  return packet.texts.size() == 1 && parse_int(packet.texts[0], seat) ? seat : -1;
}

}  // namespace

Keeper::Keeper(Word on_met, Word on_next)
    : on_met_(std::move(on_met)),
      on_next_(std::move(on_next)),
      address_(new_local_address("@lockstep-keeper-")),
      listener_(listen_locally(address_)) {}

std::string Keeper::address(int seat) const { return concat(address_, " ", seat); }

void Keeper::add_events(std::vector<Event>& events) {
  events.push_back({listener_.get(), POLLIN, [this] { accept_new(); }});
  for (Client& client : clients_) events.push_back({client.socket.get(), POLLIN, [this, &client] { serve(client); }});
}

void Keeper::accept_new() {
  std::erase_if(clients_, [](const Client& client) { return !client.socket; });  // no event refers to them now
  while (UniqueFd socket = accept_locally(listener_.get()))
    if (is_own_user(socket.get())) clients_.push_back({.socket = std::move(socket)});
}

// Disconnects whoever says anything but a packet.
bool Keeper::serve(Client& client) {
  Packet packet;
  std::vector<UniqueFd> descriptors;
  const Incoming incoming = receive_packet(client.socket.get(), packet, descriptors);
  if (incoming == Incoming::kNothingYet) return false;
  if (incoming == Incoming::kMessage)
    handle(client, packet, descriptors);
  else
    client.socket.reset();
  return true;
}

void Keeper::read_all() {
  accept_new();
  for (Client& client : clients_)
    while (client.socket && serve(client)) {
    }
}

void Keeper::handle(Client& client, const Packet& packet, std::vector<UniqueFd>& descriptors) {
  using enum Packet::Kind;
  const int generation = static_cast<int>(packet.number), seat = seat_in(packet);
  switch (packet.kind) {
    case kKeep:
      if (descriptors.size() == 1 && packet.texts.size() == 2)
        kept_[generation].push_back({packet.texts, std::move(descriptors.front())});
      return;
    case kComplete:
      complete_ = std::max(complete_, generation);
      std::erase_if(kept_, [this](const auto& entry) { return entry.first < complete_; });
      return;
    case kFetch: return send_kept(client, generation);
    case kMet: return on_met_(seat, generation);
    case kNext: client.waits_at = seat; return on_next_(seat, generation);
    default: client.socket.reset();
  }
}

void Keeper::send_kept(Client& client, int generation) {
  if (complete_ >= 0 && complete_ < generation)
    for (const Kept& kept : kept_[complete_])
      if (!send(client, {Packet::Kind::kKeep, complete_, kept.texts}, {kept.fd.get()})) return;
  send(client, {});
}

bool Keeper::send(Client& client, const Packet& packet, const std::vector<int>& descriptors) {
  if (send_packet(client.socket.get(), packet, Deadline::after(kToTakeAnswer), descriptors)) return true;
  client.socket.reset();
  return false;
}

void Keeper::tell(int seat, int generation, const Variables& variables) {
  Packet packet{.number = generation};
  for (const auto& [name, value] : variables) packet.texts.insert(packet.texts.end(), {name, value});
  for (Client& client : clients_)
    if (client.waits_at == seat && client.socket) {
      client.waits_at = -1;
      send(client, packet);
    }
}

void Keeper::forget(int seat) {
  for (Client& client : clients_)
    if (client.waits_at == seat) client.waits_at = -1;
}

}  // namespace lockstep
