#include "lockstep/strategy/kvstore/server.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/gradient/two_bit.h"
#include "lockstep/strategy/kvstore/optimizer_message.h"

namespace lockstep {
namespace {

std::string store_name(Consistency consistency, std::int64_t staleness) {
  switch (consistency) {
    case Consistency::kSync: return "dist_sync";
    case Consistency::kAsync: return "dist_async";
    case Consistency::kBounded: return concat("dist_bounded (", staleness, ")");
  }
  return {};
}

// Every server but the first leaves it to that one to gate.
std::int64_t bound_of(const KVServerOptions& options) {
  return options.consistency == Consistency::kBounded && options.server == 0 ? options.staleness
                                                                             : StalenessGate::kUnbounded;
}

std::string first_line(const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  return known != nullptr ? known->text().what : error.what();
}

bool same_layout(const BlockLayout& one, const BlockLayout& other) {
  return std::ranges::equal(one.slices(), other.slices(), [](const KeySlice& a, const KeySlice& b) {
    return a.key == b.key && a.begin == b.begin && a.count == b.count && a.dtype == b.dtype && a.trained == b.trained;
  });
}

}  // namespace

// ---- What the server's program calls

KVServer::KVServer(const KVServerOptions& options, std::vector<Link> clients)
    : options_(options),
      gate_(static_cast<int>(options.workers.size()), bound_of(options), options.servers > 1),
      statistics_{.store = store_name(options.consistency, options.staleness),
                  .workers = static_cast<int>(options.workers.size())} {
  for (Link& link : clients) clients_.push_back({.link = std::move(link)});
  const int threads = at::get_num_threads();
  for (std::size_t i = 0; i < clients_.size(); ++i)
    clients_[i].thread = std::thread([this, i, threads] {
      at::set_num_threads(threads);
      serve(static_cast<int>(i));
    });
}

KVServer::~KVServer() {
  if (std::uncaught_exceptions() > 0) {
    const Lock lock(mutex_);
    fail(std::make_exception_ptr(PeerLost({.what = concat("server ", options_.server, " has failed")})));
  }
  for (Client& each : clients_) each.thread.join();
}

BatchTotals KVServer::wait_for_pushes(std::int64_t pushes) {
  Lock lock(mutex_);
  wait_for_workers(lock, pushes);
  const auto [samples, loss] = std::exchange(totals_[pushes], {});
  totals_.erase(totals_.begin(), totals_.upper_bound(pushes));
  return {.samples = samples, .mean_loss = samples > 0 ? loss / static_cast<double>(samples) : 0};
}

ServerStatistics KVServer::statistics() const {
  const Lock lock(mutex_);
  return statistics_;
}

BlockLayout KVServer::layout() {
  Lock lock(mutex_);
  wait_for_keys(lock);
  return table_.layout();
}

std::vector<SliceState> KVServer::states(std::int64_t pushes) {
  Lock lock(mutex_);
  wait_for_keys(lock);
  wait_for_workers(lock, pushes);
  std::vector<SliceState> states;
  for (std::size_t i = 0; i < table_.layout().slices().size(); ++i) {
    states.push_back({.value = table_.value_of(i).clone(), .state = table_.state_of(i)});
    for (auto& [name, tensor] : states.back().state) tensor = tensor.clone();
  }
  return states;
}

void KVServer::set_states(const std::vector<SliceState>& states) {
  Lock lock(mutex_);
  wait_for_keys(lock);
  const bool of_optimizer = std::ranges::any_of(states, [](const SliceState& each) { return !each.state.empty(); });
  if (of_optimizer) wait(lock, "optimizer", [this] { return table_.has_optimizer(); });
  for (std::size_t i = 0; i < states.size(); ++i) table_.set(i, states[i].value, states[i].state);
}

// ---- Questions, each on its client's thread

void KVServer::serve(int number) {
  const torch::NoGradGuard no_grad;
  try {
    while (answer(number, client(number).link.receive<QuestionHeader>())) {
    }
    leave(number);
  } catch (const std::exception& error) {
    lose(number, first_line(error));
  }
}

// False once the client has said goodbye.
bool KVServer::answer(int number, const QuestionHeader& question) {
  switch (question.question) {
    case Question::kInit: create(number, question); break;
    case Question::kOptimizer: set_optimizer(number, question); break;
    case Question::kPush: push(number, question); break;
    case Question::kPull: pull(number, question); break;
    case Question::kPullRows: pull_rows(number, question); break;
    case Question::kState: send_states(number, question); break;
    case Question::kGoodbye: return false;
  }
  return true;
}

void KVServer::create(int worker, const QuestionHeader& question) {
  const Link& link = client(worker).link;
  std::vector<KeySlice> slices(static_cast<std::size_t>(question.count));
  link.receive_bytes(torch::from_blob(slices.data(), {static_cast<std::int64_t>(slices.size() * sizeof(KeySlice))}, torch::kUInt8));
  const BlockLayout layout(std::move(slices));
  const torch::Tensor inbox = link.allocate(layout.bytes());
  client(worker).outbox = link.allocate(layout.bytes());
  if (worker == 0) link.receive_bytes(inbox);
  Lock lock(mutex_);
  if (!table_.created()) table_.create(layout, static_cast<int>(options_.workers.size()));
  if (!same_layout(layout, table_.layout())) {
    fail(std::make_exception_ptr(MismatchError({.what = concat(name_of(worker), " has other keys than the workers before it"),
                                                .likely = "a model that differs between the workers",
                                                .next = "make the same model everywhere"})));
    std::rethrow_exception(failure_);
  }
  table_.set_inbox(worker, inbox);
  if (worker == 0) torch::Tensor(table_.values()).copy_(inbox);
  has_values_ = has_values_ || worker == 0;
  changed_.notify_all();
  wait_for_keys(lock);
  lock.unlock();
  link.send(AnswerHeader{});
}

void KVServer::set_optimizer(int worker, const QuestionHeader&) {
  const auto message = client(worker).link.receive<OptimizerMessage>();
  Lock lock(mutex_);
  if (!table_.has_optimizer()) table_.set_optimizer(from_message(message));
  changed_.notify_all();
  lock.unlock();
  client(worker).link.send(AnswerHeader{});
}

void KVServer::push(int worker, const QuestionHeader& question) {
  Lock lock(mutex_);
  wait(lock, "the other workers' gradients", [&] { return !table_.holds_any(worker, question.keys); });
  lock.unlock();
  const Link& link = client(worker).link;
  std::vector<bool> given(static_cast<std::size_t>(question.keys.size()));
  const torch::Tensor flags = torch::empty({question.keys.size()}, torch::kUInt8);
  link.receive_bytes(flags);
  for (std::size_t i = 0; i < given.size(); ++i) given[i] = flags.const_data_ptr<std::uint8_t>()[i] != 0;
  receive_values(worker, question);
  lock.lock();
  table_.note(worker, question.keys, given, question.samples);
  if (question.trained != 0) {
    client(worker).last_push = question;
    ++client(worker).pending;
  }
  options_.consistency == Consistency::kSync ? merge(question) : apply(lock, worker, question);
  changed_.notify_all();
  lock.unlock();
  link.send(AnswerHeader{});
}

void KVServer::receive_values(int worker, const QuestionHeader& question) {
  const Link& link = client(worker).link;
  const torch::Tensor inbox = table_.inbox(worker);
  if (question.threshold == 0) return link.receive_bytes(table_.layout().region_of(question.keys, inbox));
  const torch::Tensor words = torch::empty({question.bytes / 4}, torch::kInt32);
  link.receive_bytes(words.view(torch::kUInt8));
  std::int64_t first = 0;
  for (const KeySlice& slice : table_.layout().slices_of(question.keys)) {
    const std::int64_t count = two_bit_words(slice.count);
    const torch::Tensor into = slice.in(inbox);
    into.copy_(from_two_bits(words.narrow(0, first, count), slice.count, question.threshold, into.options()));
    first += count;
  }
}

// dist_sync: with the last worker's push all of them are applied.
void KVServer::merge(const QuestionHeader& question) {
  std::vector<int> workers(options_.workers.size());
  std::iota(workers.begin(), workers.end(), 0);
  std::vector<std::int64_t> delays;
  for (const int worker : workers) delays.push_back(table_.delay(worker, question.keys));
  table_.merge_complete(question.keys, workers, question.learning_rate);
  if (std::ranges::any_of(workers, [this](int worker) { return client(worker).pending == 0; })) return;
  std::int64_t samples = 0;
  for (const int worker : workers) {
    statistics_.add_gradient(client(worker).last_push, delays[static_cast<std::size_t>(worker)]);
    samples += client(worker).last_push.samples;
    applied(worker);
  }
  statistics_.add_update(samples);
}

// dist_async and dist_bounded: as it comes; the bound may let others go first.
void KVServer::apply(Lock& lock, int worker, const QuestionHeader& question) {
  if (question.trained != 0 && question.samples > 0) {
    wait(lock, "older gradients", [&] { return gate_.may_update(worker); });
    statistics_.add_gradient(question, table_.delay(worker, question.keys));
    statistics_.add_update(question.samples);
    gate_.update(worker);
  }
  table_.apply(worker, question.keys, question.learning_rate);
  if (question.trained != 0) applied(worker);
}

// Counts the worker's newest push of trained keys.
void KVServer::applied(int worker) {
  Client& by = client(worker);
  --by.pending;
  auto& [samples, loss] = totals_[++by.pushes];
  samples += by.last_push.samples;
  if (by.last_push.samples > 0) loss += by.last_push.loss * static_cast<double>(by.last_push.samples);
}

void KVServer::pull(int worker, const QuestionHeader& question) {
  Lock lock(mutex_);
  wait(lock, "the other workers' gradients", [&] { return !table_.holds_any(worker, question.keys); });
  if (question.trained != 0) wait(lock, "its turn to read", [&] { return gate_.may_read(worker); });
  const torch::Tensor region = table_.layout().region_of(question.keys, client(worker).outbox);
  torch::Tensor(region).copy_(table_.layout().region_of(question.keys, table_.values()));
  table_.mark_read(worker, question.keys);
  if (question.trained != 0) gate_.read(worker);
  changed_.notify_all();
  lock.unlock();
  client(worker).link.send(AnswerHeader{});
  client(worker).link.send_bytes(region);
}

void KVServer::pull_rows(int worker, const QuestionHeader& question) {
  const Link& link = client(worker).link;
  const torch::Tensor rows = torch::empty({question.count}, torch::kInt64);
  link.receive_bytes(rows.view(torch::kUInt8));
  Lock lock(mutex_);
  wait(lock, "the other workers' gradients", [&] { return !table_.holds_any(worker, question.keys); });
  torch::Tensor values = table_.values();
  const KeySlice& slice = table_.layout().slices_of(question.keys).front();
  // question.bytes: of a row
  values = slice.in(values).view(torch::kUInt8).view({-1, question.bytes}).index_select(0, rows);
  lock.unlock();
  link.send(AnswerHeader{});
  link.send_bytes(values.flatten());
}

void KVServer::send_states(int number, const QuestionHeader& question) {
  const auto all = states(question.count);
  const Link& link = client(number).link;
  link.send(AnswerHeader{.count = static_cast<std::int64_t>(all.size())});
  const BlockLayout places = layout();
  for (std::size_t i = 0; i < all.size(); ++i) {
    link.send(places.slices()[i]);
    send_state(link.world(), link.peer(), all[i]);
  }
}

// ---- Waiting, and who is gone

// A client that is silent is lost after the timeout, which ends the wait for it: this deadline is for what nobody foresaw.
template <class Ready>
void KVServer::wait(Lock& lock, const std::string& what, const Ready& ready) {
  const auto over = [&] { return failure_ || ready(); };
  const bool in_time = changed_.wait_for(lock, 2 * options_.timeout, over);
  if (!in_time)
    fail(std::make_exception_ptr(PeerLost({.what = concat("no ", what, " within ",
                                                          human_seconds(2e-3 * static_cast<double>(options_.timeout.count()))),
                                           .here = concat("server ", options_.server)})));
  if (failure_) std::rethrow_exception(failure_);
}

void KVServer::wait_for_keys(Lock& lock) {
  wait(lock, "values of the keys", [this] { return has_values_; });
}

void KVServer::wait_for_workers(Lock& lock, std::int64_t pushes) {
  wait(lock, concat("push ", pushes, " of every worker"), [&] {
    for (std::size_t i = 0; i < options_.workers.size(); ++i)
      if (clients_[i].here && clients_[i].pushes < pushes) return false;
    return true;
  });
}

std::string KVServer::name_of(int number) const {
  if (!is_worker(number)) return "the first server";
  return concat("worker ", number, " (rank ", options_.workers[static_cast<std::size_t>(number)], ")");
}

bool KVServer::any_worker_here() const {
  return std::any_of(clients_.begin(), clients_.begin() + static_cast<std::ptrdiff_t>(options_.workers.size()),
                     [](const Client& each) { return each.here; });
}

void KVServer::leave(int number) {
  const Lock lock(mutex_);
  client(number).here = false;
  if (is_worker(number)) {
    gate_.leave(number);
    ++finished_;
  }
  changed_.notify_all();
}

void KVServer::lose(int number, const std::string& why) {
  const Lock lock(mutex_);
  client(number).here = false;
  if (failure_) return;
  const std::string what = concat(name_of(number), " is lost: ", why);
  if (is_worker(number) && options_.consistency != Consistency::kSync) {
    gate_.leave(number);
    changed_.notify_all();
    client(number).link.abandon(what);
    log_warning(concat(what, "; ", any_worker_here() ? "the other workers go on" : "it was the last"));
    if (any_worker_here() || finished_ > 0) return;
  }
  fail(std::make_exception_ptr(
      PeerLost({.what = what,
                .here = concat("server ", options_.server, " after ", table_.updates(), " updates"),
                .likely = "out of memory on that machine, or pre-emption; its own output says more",
                .next = "run again with --resume, or choose dist_async, which goes on without a worker"})));
}

// With the lock held, or before there are threads to hold it. The first error stays; every client hears of it.
void KVServer::fail(std::exception_ptr error) {
  if (failure_) return;
  failure_ = std::move(error);
  changed_.notify_all();
  std::string reason;
  try {
    std::rethrow_exception(failure_);
  } catch (const std::exception& known) {
    reason = first_line(known);
  }
  for (const Client& each : clients_) each.link.abandon(reason);
}

}  // namespace lockstep
