// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/rendezvous_server.h"

#include <sys/syscall.h>

#include "agent/meet/packet_stream.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

size_t staging_bytes_of(const Options& options, int size) {
  return options.staging_bytes > 0 ? round_up(options.staging_bytes, kCacheLine) : chunk_bytes(size);
}

void take_seat(Peers& peers, int rank, const Options& options) {
  peers.take_seat(rank, options.job_ranks.empty() ? rank : options.job_ranks[static_cast<unsigned>(rank)]);
}

std::string memory_name(int rank) { return concat("the memory of rank ", rank); }

UniqueFd make_memory(int rank) { return make_segment(memory_name(rank), 0); }  // an empty arena

using Kind = Packet::Kind;

// 4: the version of the handshake. Another build has another layout.
Packet packet_of(Kind kind, int rank, int size) {
  return {.kind = kind, .number = rank, .texts = {concat("4 ", size, " ", control_bytes(size))}};
}

// kNoMessage also if it is not of this kind and size, or has not this many descriptors.
Incoming receive(int socket, Kind kind, int size, Packet& packet, std::vector<UniqueFd>& descriptors, size_t expected) {
  const Incoming incoming = receive_packet(socket, packet, descriptors, expected);
  const bool agrees =
      packet.kind == kind && packet.texts == packet_of(kind, 0, size).texts && descriptors.size() == expected;
  return incoming == Incoming::kMessage && !agrees ? Incoming::kNoMessage : incoming;
}

UniqueFd own_pidfd() {
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!fd) throw system_error("get a handle on", "this process");
  return fd;
}

// Makes what `rank` hands to the others, with room for what they hand to it.
PeerHandles own_parts(int rank, int size) {
  raise_descriptor_limit();
  PeerHandles parts;
  parts.memories.resize(size);
  parts.pidfds.resize(size);
  parts.memories[rank] = make_memory(rank);
  parts.pidfds[rank] = own_pidfd();
  return parts;
}

// The server's side, from the first connection to "go". Throws RendezvousError: ranks missing or lost at the deadline.
class ServerHandshake {
 public:
  ServerHandshake(int listener, int size, size_t staging_bytes, Deadline deadline)
      : listener_(listener), size_(size), deadline_(deadline), parts_(own_parts(0, size)) {
    peers_.resize(size);
    parts_.control = make_control_segment(size, staging_bytes);
  }

  PeerHandles exchange() {
    wait_for_hellos();
    for (int rank = 1; rank < size_; ++rank) welcome(rank);
    for (int rank = 1; rank < size_; ++rank) check_segment(parts_.memories[rank].get(), 0, memory_name(rank));
    parts_.pidfds[0].reset();
    return std::move(parts_);
  }

  void wait_until_ready() {
    for (int rank = 1; rank < size_; ++rank) {
      const int socket = peers_[rank].get();
      Packet ready;
      std::vector<UniqueFd> none;
      if (!wait_for(POLLIN, socket, deadline_) ||
          receive(socket, Kind::kMet, size_, ready, none, 0) != Incoming::kMessage)
        lost(rank);
    }
  }

  void go() {
    for (int rank = 1; rank < size_; ++rank) send_to(rank, Kind::kDone, rank, {});
  }

 private:
  void wait_for_hellos() {
    while (!missing().empty()) {
      wait_for_input();
      accept_new();
      std::erase_if(newcomers_, [this](UniqueFd& newcomer) { return hear(newcomer); });
      drop_lost_peers();
      if (missing().empty() || !deadline_.passed()) continue;
      throw RendezvousError({.what = concat("ranks that did not come: ", join(missing(), ", "), " of ", size_),
                             .here = "rank 0, waiting for the ranks of this machine",
                             .likely = "they did not start, ended early, or run as another user",
                             .next = "read their logs; raise the timeout if they start slowly"});
    }
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 1; rank < size_; ++rank)
      if (!peers_[rank]) ranks.push_back(rank);
    return ranks;
  }

  void wait_for_input() {
    std::vector<pollfd> polls{to_poll(listener_)};
    for (const UniqueFd& newcomer : newcomers_) polls.push_back(to_poll(newcomer.get()));
    for (const UniqueFd& peer : peers_) polls.push_back(to_poll(peer.get()));
    poll_for(polls, deadline_.left());
  }

  void accept_new() {
    while (UniqueFd newcomer = accept_locally(listener_))
      if (is_own_user(newcomer.get())) newcomers_.push_back(std::move(newcomer));
  }

  // True once there is nothing more to hear: it became a peer, or is disconnected.
  bool hear(UniqueFd& newcomer) {
    Packet hello;
    std::vector<UniqueFd> descriptors;
    const Incoming incoming = receive(newcomer.get(), Kind::kHello, size_, hello, descriptors, 2);
    if (incoming == Incoming::kNothingYet) return false;
    if (incoming != Incoming::kMessage || hello.number < 1 || hello.number >= size_) return true;
    const int rank = static_cast<int>(hello.number);
    drop_lost_peers();  // a rank that came, died and was started again may have left two hellos here
    if (peers_[rank]) return true;
    peers_[rank] = std::move(newcomer);
    parts_.memories[rank] = std::move(descriptors[0]);
    parts_.pidfds[rank] = std::move(descriptors[1]);
    return true;
  }

  // A peer has nothing to say before it was welcomed: if there is something, it is gone.
  void drop_lost_peers() {
    for (UniqueFd& peer : peers_) {
      pollfd gone = to_poll(peer.get());
      if (poll_for({&gone, 1}, {}) > 0) peer.reset();
    }
  }

  void welcome(int rank) {
    send_to(rank, Kind::kKeep, rank, {parts_.control.get()});
    for (int other = 0; other < size_; ++other)
      if (other != rank) send_to(rank, Kind::kKeep, other, {parts_.memories[other].get(), parts_.pidfds[other].get()});
  }

  void send_to(int rank, Kind kind, int about, const std::vector<int>& descriptors) {
    if (!send_packet(peers_[rank].get(), packet_of(kind, about, size_), deadline_, descriptors)) lost(rank);
  }

  [[noreturn]] static void lost(int rank) {
    throw RendezvousError({.what = concat("rank ", rank, " was lost while the ranks of this machine connected"),
                           .here = "rank 0",
                           .likely = "it ended, or could not map the shared memory",
                           .next = "read its log"});
  }

  int listener_;
  int size_;
  Deadline deadline_;
  std::vector<UniqueFd> newcomers_;  // connected, did not say hello yet
  IntVector<UniqueFd> peers_;        // by rank; entry 0 stays empty
  PeerHandles parts_;
};

UniqueFd connect_to_server(const std::string& address, Deadline deadline) {
  try {
    UniqueFd socket = connect_locally(address, SOCK_SEQPACKET, deadline);
    if (is_own_user(socket.get())) return socket;
  } catch (const SystemError& error) {
    throw RendezvousError({.what = error.text().what,
                           .here = address,
                           .likely = "rank 0 is gone, or belongs to another user",
                           .next = "start all ranks of a machine as one user; read rank 0's log"});
  }
  throw RendezvousError({.what = "the other end of the socket belongs to another user", .here = address});
}

// A client's side.
class ClientHandshake {
 public:
  ClientHandshake(const std::string& address, int rank, int size, Deadline deadline)
      : rank_(rank), size_(size), deadline_(deadline), socket_(connect_to_server(address, deadline)) {}

  PeerHandles exchange() {
    if (rank_ < 1 || rank_ >= size_) refused();  // as rank 0 would, which is the server's
    PeerHandles parts = own_parts(rank_, size_);
    send(Kind::kHello, {parts.memories[rank_].get(), parts.pidfds[rank_].get()});
    parts.pidfds[rank_].reset();
    std::vector<UniqueFd> control;
    receive(Kind::kKeep, control, 1);
    check_segment(control[0].get(), control_bytes(size_), "the control segment");
    parts.control = std::move(control[0]);
    for (int i = 1; i < size_; ++i) {
      std::vector<UniqueFd> handles;
      const int64_t number = receive(Kind::kKeep, handles, 2).number;
      if (number < 0 || number >= size_ || number == rank_) refused();
      const int other = static_cast<int>(number);
      check_segment(handles[0].get(), 0, memory_name(other));
      parts.memories[other] = std::move(handles[0]);
      parts.pidfds[other] = std::move(handles[1]);
    }
    return parts;
  }

  void finish() {
    send(Kind::kMet, {});
    std::vector<UniqueFd> none;
    receive(Kind::kDone, none, 0);
  }

 private:
  void send(Kind kind, const std::vector<int>& descriptors) const {
    if (!send_packet(socket_.get(), packet_of(kind, rank_, size_), deadline_, descriptors)) refused();
  }

  Packet receive(Kind kind, std::vector<UniqueFd>& descriptors, size_t expected) const {
    Packet message;
    if (!wait_for(POLLIN, socket_.get(), deadline_))
      throw RendezvousError({.what = "not all ranks of this machine came before the deadline",
                             .here = concat("rank ", rank_, " of ", size_),
                             .likely = "a rank that did not start",
                             .next = "rank 0's error names it"});
    if (shm::receive(socket_.get(), kind, size_, message, descriptors, expected) != Incoming::kMessage) refused();
    return message;
  }

  [[noreturn]] static void refused() {
    throw RendezvousError({.what = "rank 0 closed the connection",
                           .likely = "it ended, another rank was lost, or this rank's number, size or version is not "
                                     "what rank 0 expects",
                           .next = "read rank 0's log; start all ranks from the same installation"});
  }

  int rank_;
  int size_;
  Deadline deadline_;
  UniqueFd socket_;
};

}  // namespace

RendezvousServer::RendezvousServer(int size, const Options& options)
    : size_(size),
      options_(options),
      address_(new_local_address("@lockstep-shm-")),
      listener_(listen_locally(address_)) {}

GroupPtr RendezvousServer::connect(Deadline deadline) {
  ServerHandshake handshake(listener_.get(), size_, staging_bytes_of(options_, size_), deadline);
  const auto peers = std::make_shared<Peers>(handshake.exchange());
  take_seat(*peers, 0, options_);
  handshake.wait_until_ready();
  listener_.reset();
  handshake.go();
  return Group::of_all(peers, 0, options_.timeout);
}

GroupPtr join_rendezvous(const std::string& address, int rank, int size, Deadline deadline, const Options& options) {
  ClientHandshake handshake(address, rank, size, deadline);
  const auto peers = std::make_shared<Peers>(handshake.exchange());
  take_seat(*peers, rank, options);
  handshake.finish();
  return Group::of_all(peers, rank, options.timeout);
}

std::vector<GroupPtr> make_thread_group(int size, const Options& options) {
  PeerHandles parts;
  parts.control = make_control_segment(size, staging_bytes_of(options, size));
  parts.share_ordinary_memory = options.share_ordinary_memory;
  for (int rank = 0; rank < size; ++rank) parts.memories.push_back(make_memory(rank));
  const auto peers = std::make_shared<Peers>(std::move(parts));
  for (int rank = 0; rank < size; ++rank) take_seat(*peers, rank, options);
  std::vector<GroupPtr> groups;
  for (int rank = 0; rank < size; ++rank) groups.push_back(Group::of_all(peers, rank, options.timeout));
  return groups;
}

}  // namespace lockstep::shm
