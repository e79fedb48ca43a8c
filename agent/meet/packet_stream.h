// SPDX-License-Identifier: Apache-2.0
// agent/meet/packet_stream.h: what processes of a job say to one another: to a store, to a launcher's keeper, a launcher to its
// contact, and the ranks of a machine while they connect.
//
// Flow:    meeting_client.h, store_server.h, machines.cc -> here -> channel.h
//          agent/recover/, collective/shm/connect/ -> here -> a local socket
// Owns:    the channel, and what has been read or is still to be written
// Threads: one at a time
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "agent/meet/channel.h"
#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/deadline.h"

namespace lockstep {

struct Packet {
  enum class Kind : uint8_t {
    kHello = 1,
    kSet,
    kGet,
    kAdd,
    kCompareSet,
    kDelete,
    kCheck,
    kCount,
    kAppend,
    kSetOwn,
    kList,  // asked by a client
    kDone,
    kMissing,
    kRefused,   // answered by the store
    kKeep,      // local rank, name; with the descriptor of memory
    kComplete,  // its memory holds all state: what is older may go
    kFetch,     // answered by kKeep for all memory of the newest complete generation before, then kDone
    kMet,       // seat: this rank has met the others
    kNext,      // seat: this rank has lost another one; answered by kDone with its variables: name, value, ...
  };
  static constexpr size_t kMostTexts = size_t{1} << 17;  // a key of each rank

  Kind kind = Kind::kDone;
  int64_t number = 0;  // to and from the keeper: the generation
  std::vector<std::string> texts{};
};

// Length, kind, number; then each text after its own length. All as the machine has them: x86-64 is the only one.
std::string encode(const Packet& packet);
std::optional<Packet> decode(std::string_view body);  // without the length; nothing: malformed

// As one message of a local socket. False: the other end is gone, or did not take it before the deadline.
bool send_packet(int socket, const Packet& packet, Deadline deadline, const std::vector<int>& descriptors = {});

enum class Incoming { kMessage, kNothingYet, kNoMessage };

// Does not block. kNoMessage: the other end is gone, or has sent something else. Throws SystemError: fewer descriptors than
// `expected` came, because this process can have no more.
Incoming receive_packet(int socket, Packet& packet, std::vector<UniqueFd>& descriptors, size_t expected = 0);

class PacketStream {
 public:
  static constexpr size_t kLongestPacket = size_t{16} << 20;
  static constexpr size_t kLongestHello = 64;  // of somebody who is not known yet

  explicit PacketStream(std::unique_ptr<Channel> channel, size_t longest = kLongestPacket)
      : channel_(std::move(channel)), longest_(longest) {}

  // Do not block. False: the peer is gone, or has sent what is no packet.
  bool read();
  bool write();

  std::optional<Packet> next();  // of those that have come
  void put(const Packet& packet) { out_ += encode(packet); }
  bool has_to_write() const { return sent_ < out_.size(); }
  bool is_broken() const { return broken_; }  // what came last was no packet
  void allow(size_t longest) { longest_ = longest; }

  int fd() const { return channel_->fd(); }
  short events() const { return channel_->events(has_to_write()); }

 private:
  std::optional<uint32_t> length() const;  // of the packet that comes next; nothing: not known yet
  bool has_packet() const;

  std::unique_ptr<Channel> channel_;
  size_t longest_;
  std::string in_;
  std::string out_;
  size_t sent_ = 0;  // of it
  bool broken_ = false;
};

}  // namespace lockstep
