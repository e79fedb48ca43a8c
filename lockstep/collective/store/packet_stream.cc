// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/store/packet_stream.h"

#include <array>
#include <cstring>

namespace lockstep {
namespace {

using Length = std::uint32_t;

template <class Number>
void put_number(std::string& bytes, Number number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// Takes a number off the front.
template <class Number>
std::optional<Number> take_number(std::string_view& bytes) {
  Number number{};
  if (bytes.size() < sizeof number) return std::nullopt;
  std::memcpy(&number, bytes.data(), sizeof number);
  bytes.remove_prefix(sizeof number);
  return number;
}

}  // namespace

std::string encode(const Packet& packet) {
  std::string body;
  put_number(body, packet.kind);
  put_number(body, packet.number);
  for (const std::string& text : packet.texts) {
    put_number(body, static_cast<Length>(text.size()));
    body += text;
  }
  std::string bytes;
  put_number(bytes, static_cast<Length>(body.size()));
  return bytes + body;
}

std::optional<Packet> decode(std::string_view body) {
  const auto kind = take_number<Packet::Kind>(body);
  const auto number = take_number<std::int64_t>(body);
  if (!number || *kind < Packet::Kind::kHello || *kind > Packet::Kind::kRefused) return std::nullopt;
  Packet packet{*kind, *number, {}};
  while (!body.empty()) {
    const auto length = take_number<Length>(body);
    if (!length || *length > body.size() || packet.texts.size() == Packet::kMostTexts) return std::nullopt;
    packet.texts.emplace_back(body.substr(0, *length));
    body.remove_prefix(*length);
  }
  return packet;
}

bool PacketStream::has_packet() const {
  Length length = 0;
  if (in_.size() < sizeof length) return false;
  std::memcpy(&length, in_.data(), sizeof length);
  return in_.size() - sizeof length >= length;
}

// Never holds more than one packet and a buffer's worth of the next: the length is checked before its bytes are kept.
bool PacketStream::read() {
  std::array<char, 4096> room;
  while (!broken_ && !has_packet()) {
    const auto bytes = channel_->read(room);
    if (!bytes) return false;
    if (*bytes == 0) return true;
    in_.append(room.data(), *bytes);
    Length length = 0;
    if (in_.size() < sizeof length) continue;
    std::memcpy(&length, in_.data(), sizeof length);
    broken_ = length > longest_;
  }
  return !broken_;
}

bool PacketStream::write() {
  while (has_to_write()) {
    const auto bytes = channel_->write(std::span<const char>(out_).subspan(sent_));
    if (!bytes) return false;
    if (*bytes == 0) return true;
    sent_ += *bytes;
  }
  out_.clear();
  sent_ = 0;
  return true;
}

std::optional<Packet> PacketStream::next() {
  if (broken_ || !has_packet()) return std::nullopt;
  Length length = 0;
  std::memcpy(&length, in_.data(), sizeof length);
  broken_ = length > longest_;  // the one behind the last
  auto packet = broken_ ? std::nullopt : decode(std::string_view(in_).substr(sizeof length, length));
  broken_ = !packet.has_value();
  in_.erase(0, sizeof length + length);
  return packet;
}

}  // namespace lockstep
