// strategy/kvstore/messages.h: what workers and servers say to each other.
//
// A client (worker, or the first server) asks, the server answers, one question at a time: a header of fixed size, then
// what belongs to it. Both sides know the length of everything before it comes. With kPushPull values go in parts,
// both ways at the same time: new values of a part come back as soon as all workers have pushed it.
//
//   question     beside the header                          answer, after its header
//   kInit        table of slices; the first worker: values
//   kOptimizer   the optimizer's options
//   kPush        which slices have a value; their values
//   kPushPull    the same, in parts                        no header; the slices' values in the same parts
//   kPull                                                   the slices' values
//   kPullRows    numbers of rows                            the rows
//   kState                                                  per slice: value and the optimizer's state
//   kAlive                                                  none, not even a header; nor
//   kGoodbye
//
// Flow:    dist_kvstore.h -> here -> World's messages -> server.h, and back
// Owns:    a Link: a World of its own with two ranks, the server and the client
// Threads: a Link belongs to one thread, but for abandon()
// Ranks:   one of the two
#pragma once

#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/strategy/kvstore/key_plan.h"
#include "lockstep/world.h"

namespace lockstep {

enum class Question : std::int64_t { kInit, kOptimizer, kPush, kPushPull, kPull, kPullRows, kState, kAlive, kGoodbye };

// Of `bytes` that a server has: about sixteen parts.
inline std::int64_t part_bytes(std::int64_t bytes) { return std::max(bytes / 16, std::int64_t{256} << 10); }

struct QuestionHeader {
  Question question = Question::kGoodbye;
  SliceRange slices{};       // of this server
  std::int64_t count = 0;    // kInit: slices; kPullRows: rows; kState: pushes of every worker to wait for
  std::int64_t bytes = 0;    // kPullRows: of a row
  std::int64_t trained = 0;  // 1: there are trained keys among them
  // kPush, kPushPull:
  std::int64_t samples = 0;                                         // that the gradient is the mean of
  std::int64_t devices = 1;                                         // that computed it
  double loss = 0;                                                  // mean over the samples
  double learning_rate = std::numeric_limits<double>::quiet_NaN();  // NaN: the optimizer's own
  double threshold = 0;                                             // of two-bit values; 0: values as they are
};

struct AnswerHeader {
  std::int64_t count = 0;  // kState: slices
};

class Link {
 public:
  Link(World pair, int peer_in_job) : pair_(std::move(pair)), peer_in_job_(peer_in_job) {}

  // A value of fixed size, or bytes of a length that both sides know. Block until they are there, or on their way.
  // Throw PeerLost.
  template <class Header>
  void send(const Header& header) const {
    static_assert(std::is_trivially_copyable_v<Header>);
    send_bytes(bytes_of(const_cast<Header*>(&header), sizeof header));
  }
  template <class Header>
  Header receive() const {
    static_assert(std::is_trivially_copyable_v<Header>);
    Header header{};
    receive_bytes(bytes_of(&header, sizeof header));
    return header;
  }
  void send_bytes(const torch::Tensor& bytes) const;
  void receive_bytes(const torch::Tensor& bytes) const;
  [[nodiscard]] Work start_sending(const torch::Tensor& bytes) const;    // not of nothing
  [[nodiscard]] Work start_receiving(const torch::Tensor& bytes) const;  // not of nothing

  torch::Tensor allocate(std::int64_t bytes) const;  // zeros, where the other side can read them
  const World& world() const { return pair_; }
  int peer() const { return 1 - pair_.rank(); }
  int peer_in_job() const { return peer_in_job_; }  // its rank among all servers and workers

  // Ends every wait at both ends. From any thread.
  void abandon(const std::string& reason) const { pair_.abandon(reason); }

 private:
  static torch::Tensor bytes_of(void* data, std::size_t size) {
    return torch::from_blob(data, {static_cast<std::int64_t>(size)}, torch::kUInt8);
  }
  // Each message has a tag of its own: with several of one tag under way over Gloo, a worker and its server stood
  // still.
  struct Numbers {
    int sent = 0;
    int received = 0;
  };
  static int next(int& number) { return number = number % kTags + 1; }
  static constexpr int kTags = 1 << 20;

  World pair_;
  int peer_in_job_;
  std::shared_ptr<Numbers> numbers_ = std::make_shared<Numbers>();
};

// Which of the ranks are servers, in the order of their numbers, and which are workers.
struct Roles {
  std::vector<int> servers;  // ranks
  std::vector<int> workers;
  int server_of(int rank) const;  // its number among the servers; -1: it is none
  int worker_of(int rank) const;
};

// serves: does this rank? All ranks call. Throws UsageError: no server, no worker, or rank 0 is none.
Roles agree_on_roles(const World& world, bool serves);

// How long each side of a link waits for the other. Clients wait longest, so that they hear of a lost client instead of
// losing the server.
struct LinkPatience {
  std::chrono::milliseconds of_servers;
  std::chrono::milliseconds of_clients;
};

// Links of this rank with connections of their own. Clients: the workers in order, and last, for every server but the
// first, the first server. All ranks call.
struct Links {
  std::vector<Link> clients;  // of a server
  std::vector<Link> servers;  // of a client; the first server has those of the other servers
};
Links connect_links(const World& world, const Roles& roles, const LinkPatience& patience);

}  // namespace lockstep
