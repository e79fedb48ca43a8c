// SPDX-License-Identifier: Apache-2.0
#include "agent/recover/keeper.h"

#include <unistd.h>

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// A rank takes an answer at once, unless it was stopped; then the launcher does not wait for it.
constexpr milliseconds kToTakeAnswer{200};

KeeperMessage generation_message(int generation, const Variables& variables) {
  KeeperMessage message{.kind = KeeperMessage::kGeneration, .generation = generation};
  std::string text;
  for (const auto& [name, value] : variables) text += concat(name, "=", value, "\n");
  message.set_text(text);
  return message;
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

std::vector<int> Keeper::descriptors() const {
  std::vector<int> fds = {listener_.get()};
  for (const Client& client : clients_) fds.push_back(client.socket.get());
  for (const auto& [generation, all] : kept_)
    for (const Kept& kept : all) fds.push_back(kept.fd.get());
  return fds;
}

void Keeper::accept_new() {
  std::erase_if(clients_, [](const Client& client) { return !client.socket; });  // no event refers to them now
  while (UniqueFd socket = accept_locally(listener_.get()))
    if (is_own_user(socket.get())) clients_.push_back({.socket = std::move(socket)});
}

// Disconnects whoever says anything but a KeeperMessage.
bool Keeper::serve(Client& client) {
  KeeperMessage message;
  std::vector<UniqueFd> descriptors;
  const Incoming incoming = receive_message(client.socket.get(), message, descriptors);
  if (incoming == Incoming::kNothingYet) return false;
  if (incoming == Incoming::kMessage)
    handle(client, message, descriptors);
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

void Keeper::handle(Client& client, const KeeperMessage& message, std::vector<UniqueFd>& descriptors) {
  using enum KeeperMessage::Kind;
  switch (message.kind) {
    case kKeep:
      if (descriptors.size() == 1)
        kept_[message.generation].push_back({message.get_text(), message.local_rank, std::move(descriptors.front())});
      return;
    case kComplete:
      complete_ = std::max(complete_, message.generation);
      std::erase_if(kept_, [this](const auto& entry) { return entry.first < complete_; });
      return;
    case kFetch: return send_kept(client, message.generation);
    case kMet: return on_met_(message.seat, message.generation);
    case kNext: client.waits_at = message.seat; return on_next_(message.seat, message.generation);
    default: client.socket.reset();
  }
}

void Keeper::send_kept(Client& client, int generation) {
  KeeperMessage message{.kind = KeeperMessage::kKept};
  if (complete_ >= 0 && complete_ < generation)
    for (const Kept& kept : kept_[complete_]) {
      message.generation = complete_;
      message.local_rank = kept.local_rank;
      message.set_text(kept.name);
      if (!send(client, message, {kept.fd.get()})) return;
    }
  send(client, {.kind = KeeperMessage::kNoMore});
}

bool Keeper::send(Client& client, const KeeperMessage& message, const std::vector<int>& descriptors) {
  if (send_message(client.socket.get(), message, Deadline::after(kToTakeAnswer), descriptors)) return true;
  client.socket.reset();
  return false;
}

void Keeper::tell(int seat, int generation, const Variables& variables) {
  for (Client& client : clients_)
    if (client.waits_at == seat && client.socket) {
      client.waits_at = -1;
      send(client, generation_message(generation, variables));
    }
}

void Keeper::forget(int seat) {
  for (Client& client : clients_)
    if (client.waits_at == seat) client.waits_at = -1;
}

}  // namespace lockstep
