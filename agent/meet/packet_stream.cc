// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/packet_stream.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace lockstep {
namespace {

using Length = uint32_t;

constexpr size_t kLongestMessage = size_t{1} << 14;  // of a local socket

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
  const auto number = take_number<int64_t>(body);
  if (!number || *kind < Packet::Kind::kHello || *kind > Packet::Kind::kNext) return std::nullopt;
  Packet packet{*kind, *number, {}};
  while (!body.empty()) {
    const auto length = take_number<Length>(body);
    if (!length || *length > body.size() || packet.texts.size() == Packet::kMostTexts) return std::nullopt;
    packet.texts.emplace_back(body.substr(0, *length));
    body.remove_prefix(*length);
  }
  return packet;
}

bool send_packet(int socket, const Packet& packet, Deadline deadline, const std::vector<int>& descriptors) {
  const std::string message = encode(packet);
  return send_with_descriptors(socket, std::as_bytes(std::span(message)), descriptors, deadline);
}

Incoming receive_packet(int socket, Packet& packet, std::vector<UniqueFd>& descriptors, size_t expected) {
  std::array<char, kLongestMessage> room;
  const auto bytes = receive_with_descriptors(socket, std::as_writable_bytes(std::span(room)), descriptors, expected);
  if (bytes < 0) return Incoming::kNothingYet;
  std::string_view message(room.data(), std::min(static_cast<size_t>(bytes), room.size()));
  const auto length = take_number<Length>(message);
  auto received = length == message.size() ? decode(message) : std::nullopt;
  if (!received) return Incoming::kNoMessage;
  packet = std::move(*received);
  return Incoming::kMessage;
}

std::optional<uint32_t> PacketStream::length() const {
  std::string_view in = in_;
  return take_number<Length>(in);
}

bool PacketStream::has_packet() const { return length() && in_.size() - sizeof(Length) >= *length(); }

// Never holds more than one packet and a buffer's worth of the next: the length is checked before its bytes are kept.
bool PacketStream::read() {
  std::array<char, 4096> room;
  while (!broken_ && !has_packet()) {
    const auto bytes = channel_->read(room);
    if (!bytes) return false;
    if (*bytes == 0) return true;
    in_.append(room.data(), *bytes);
    broken_ = length().value_or(0) > longest_;
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
  const Length bytes = *length();
  broken_ = bytes > longest_;  // the one behind the last
  auto packet = broken_ ? std::nullopt : decode(std::string_view(in_).substr(sizeof bytes, bytes));
  broken_ = !packet.has_value();
  in_.erase(0, sizeof bytes + bytes);
  return packet;
}

}  // namespace lockstep
