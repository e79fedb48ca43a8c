// What clients ask of a server (server.h), each on its client's thread.
#include "lockstep/strategy/kvstore/server.h"

#include <algorithm>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/gradient/two_bit.h"
#include "lockstep/strategy/kvstore/optimizer_message.h"

namespace lockstep {
namespace {

bool same_layout(const BlockLayout& one, const BlockLayout& other) {
  return std::ranges::equal(one.slices(), other.slices(), [](const KeySlice& a, const KeySlice& b) {
    return a.key == b.key && a.begin == b.begin && a.count == b.count && a.dtype == b.dtype && a.trained == b.trained;
  });
}

}  // namespace

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

}  // namespace lockstep
