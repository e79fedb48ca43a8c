// strategy/kvstore/server.h: one server of a distributed store. S2.
//
//   worker 0 ---- link ---- thread 0 --\                        dist_sync     merges when all workers have pushed
//   worker 1 ---- link ---- thread 1 ---+--> table + optimizer  dist_async    updates with each push as it comes
//   worker 2 ---- link ---- thread 2 --/        (one lock)      dist_bounded  the same, unless a gradient got too old
//
// A thread per client receives its questions, waits until the consistency lets them through, and answers. Values travel
// outside of the lock, updates are made inside of it: no two at the same time.
//
// Flow:    messages.h -> here -> server_table.h -> optimizer/
// Owns:    the table, its threads, its ends of the links
// Threads: all functions from any
// Ranks:   a server
//
// Who is lost: the links have connections of their own, so that each client is noticed by its thread alone: a killed
// one within 100 ms, one that says nothing for as long as its link allows then. dist_sync: everything ends with
// PeerLost, here and at the workers. dist_async and dist_bounded: the others go on; without any worker left it ends
// with PeerLost.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/batch_totals.h"
#include "lockstep/strategy/kvstore/messages.h"
#include "lockstep/strategy/kvstore/server_statistics.h"
#include "lockstep/strategy/kvstore/server_table.h"
#include "lockstep/strategy/kvstore/slice_state.h"
#include "lockstep/strategy/kvstore/staleness_gate.h"

namespace lockstep {

enum class Consistency { kSync, kAsync, kBounded };

struct KVServerOptions {
  Consistency consistency = Consistency::kSync;
  std::int64_t staleness = 0;  // kBounded: the largest delay
  std::vector<int> workers{};  // their ranks, for messages
  int server = 0;              // which of
  int servers = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

class KVServer {
 public:
  // clients: the workers in order; of every server but the first also the first server.
  KVServer(const KVServerOptions& options, std::vector<Link> clients);

  // In good order it blocks until every client has left, or is lost. While an exception is on its way out the clients
  // are told at once.
  ~KVServer();
  KVServer(const KVServer&) = delete;
  KVServer& operator=(const KVServer&) = delete;

  // Blocks until every worker that is still there has pushed gradients `pushes` times and they are applied. Returns
  // samples and mean loss of those that were each worker's last of these. Throws PeerLost.
  BatchTotals wait_for_pushes(std::int64_t pushes);

  ServerStatistics statistics() const;

  // The slices as they lie, and all their states: a copy. Block until the store has its keys, and every worker that is
  // still there has pushed gradients `pushes` times. Throw PeerLost.
  BlockLayout layout();
  std::vector<SliceState> states(std::int64_t pushes = 0);
  void set_states(const std::vector<SliceState>& states);

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Client {
    Link link;
    std::thread thread{};
    torch::Tensor outbox{};
    bool here = true;
    int pending = 0;                // pushes of trained keys that are not applied
    std::int64_t pushes = 0;        // and those that are
    QuestionHeader last_push{};     // the newest of trained keys
    std::deque<SliceRange> owed{};  // pushed with kPushPull, and not answered
    std::vector<Work> answers{};    // on their way
  };

  bool is_worker(int client) const { return client < static_cast<int>(options_.workers.size()); }
  Client& client(int number) { return clients_[static_cast<std::size_t>(number)]; }
  std::string name_of(int client) const;

  void serve(int client);
  bool answer(int client, const QuestionHeader& question);
  void create(int worker, const QuestionHeader& question);
  void set_optimizer(int worker, const QuestionHeader& question);
  void push(int worker, const QuestionHeader& question);
  void push_pull(int worker, const QuestionHeader& question);
  void answer_owed(int worker, bool all);
  std::vector<bool> receive_flags(int worker, SliceRange slices);
  torch::Tensor place_for(int worker, const QuestionHeader& question, SliceRange slices) const;
  void unpack(int worker, const QuestionHeader& question, SliceRange slices, const torch::Tensor& words) const;
  void take(int worker, const QuestionHeader& question, SliceRange slices, const torch::Tensor& values,
            const std::vector<bool>& given);
  void merge(const QuestionHeader& question, SliceRange slices);
  void apply(Lock& lock, int worker, const QuestionHeader& question);
  void applied(int worker);
  torch::Tensor read(int worker, SliceRange slices);
  void pull(int worker, const QuestionHeader& question);
  void wait_for_turn_to_read(Lock& lock, int worker);
  void pull_rows(int worker, const QuestionHeader& question);
  void send_states(int client, const QuestionHeader& question);

  void wait(Lock& lock, const std::string& what, const std::function<bool()>& ready);
  void wait_until_merged(Lock& lock, int worker, SliceRange slices);
  void wait_for_keys(Lock& lock);
  void wait_for_workers(Lock& lock, std::int64_t pushes);
  void leave(int client);
  void lose(int client, const std::string& why);
  std::exception_ptr loss(const std::string& what) const;
  void fail(std::exception_ptr error);
  bool any_worker_here() const;

  KVServerOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  ServerTable table_;
  StalenessGate gate_;
  ServerStatistics statistics_;
  std::map<std::int64_t, std::pair<std::int64_t, double>> totals_;  // number of the push -> samples, sum of losses
  bool has_values_ = false;
  int finished_ = 0;  // workers that left in good order
  std::exception_ptr failure_;
  std::vector<Client> clients_;
};

}  // namespace lockstep
