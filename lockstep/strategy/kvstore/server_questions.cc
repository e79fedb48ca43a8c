// What clients ask of a server (server.h), each on its client's thread.
#include "lockstep/strategy/kvstore/server.h"

#include <algorithm>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
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
    case Question::kPushPull: push_pull(number, question); break;
    case Question::kPull: pull(number, question); break;
    case Question::kPullRows: pull_rows(number, question); break;
    case Question::kState: send_states(number, question); break;
    case Question::kAlive: break;
    case Question::kGoodbye: return false;
  }
  return true;
}

void KVServer::create(int worker, const QuestionHeader& question) {
  const Link& link = client(worker).link;
  std::vector<KeySlice> slices(static_cast<std::size_t>(question.count));
  link.receive_bytes(
      torch::from_blob(slices.data(), {static_cast<std::int64_t>(slices.size() * sizeof(KeySlice))}, torch::kUInt8));
  const BlockLayout layout(std::move(slices));
  const torch::Tensor inbox = link.allocate(layout.bytes());
  client(worker).outbox = link.allocate(layout.bytes());
  if (worker == 0) link.receive_bytes(inbox);
  Lock lock(mutex_);
  if (!table_.created()) table_.create(layout, static_cast<int>(options_.workers.size()));
  if (!same_layout(layout, table_.layout())) {
    fail(std::make_exception_ptr(
        MismatchError({.what = concat(name_of(worker), " has other keys than the workers before it"),
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
  {
    Lock lock(mutex_);
    wait_until_merged(lock, worker, question.slices);
  }
  const std::vector<bool> given = receive_flags(worker, question.slices);
  const torch::Tensor values = place_for(worker, question, question.slices);
  client(worker).link.receive_bytes(values);
  take(worker, question, question.slices, values, given);
  client(worker).link.send(AnswerHeader{});
}

// Part by part. All are expected at once, so that none waits for the one before to be merged.
void KVServer::push_pull(int worker, const QuestionHeader& question) {
  {
    Lock lock(mutex_);
    wait_until_merged(lock, worker, question.slices);
  }
  const std::vector<bool> given = receive_flags(worker, question.slices);
  std::vector<torch::Tensor> values;
  std::vector<Work> coming;
  const auto parts = table_.layout().parts_of(question.slices, part_bytes(table_.layout().bytes()));
  for (const SliceRange part : parts) {
    values.push_back(place_for(worker, question, part));
    if (values.back().numel() > 0) coming.push_back(client(worker).link.start_receiving(values.back()));
  }
  auto next = coming.begin();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (values[i].numel() > 0) (next++)->wait();
    const auto first = given.begin() + (parts[i].first - question.slices.first);
    take(worker, question, parts[i], values[i], {first, first + parts[i].size()});
    client(worker).owed.push_back(parts[i]);
    answer_owed(worker, parts[i].last == question.slices.last);
  }
}

std::vector<bool> KVServer::receive_flags(int worker, SliceRange slices) {
  const torch::Tensor flags = torch::empty({slices.size()}, torch::kUInt8);
  client(worker).link.receive_bytes(flags);
  const auto* data = flags.const_data_ptr<std::uint8_t>();
  return std::vector<bool>(data, data + flags.numel());  // not a list of two
}

// For values as they travel.
torch::Tensor KVServer::place_for(int worker, const QuestionHeader& question, SliceRange slices) const {
  if (question.threshold == 0) return table_.layout().region_of(slices, table_.inbox(worker));
  std::int64_t words = 0;
  for (const KeySlice& slice : table_.layout().slices_of(slices)) words += two_bit_words(slice.count);
  return torch::empty({words * 4}, torch::kUInt8);
}

void KVServer::unpack(int worker, const QuestionHeader& question, SliceRange slices, const torch::Tensor& words) const {
  std::int64_t first = 0;
  for (const KeySlice& slice : table_.layout().slices_of(slices)) {
    const std::int64_t count = two_bit_words(slice.count);
    const torch::Tensor into = slice.in(table_.inbox(worker));
    into.copy_(from_two_bits(words.narrow(0, first, count), slice.count, question.threshold, into.options()));
    first += count;
  }
}

// The worker's gradient is complete with its last slices.
void KVServer::take(int worker, const QuestionHeader& question, SliceRange slices, const torch::Tensor& values,
                    const std::vector<bool>& given) {
  if (question.threshold > 0) unpack(worker, question, slices, values.view(torch::kInt32));
  Lock lock(mutex_);
  table_.note(worker, slices, given, question.samples);
  if (question.trained != 0 && slices.last == question.slices.last) {
    client(worker).last_push = question;
    ++client(worker).pending;
  }
  options_.consistency == Consistency::kSync ? merge(question, slices) : apply(lock, worker, question);
  changed_.notify_all();
}

// In the order in which they were pushed. What other workers have not pushed yet waits for a later call, unless it is
// `all` that has to go.
void KVServer::answer_owed(int worker, bool all) {
  Client& to = client(worker);
  while (!to.owed.empty()) {
    Lock lock(mutex_);
    const auto merged = [&] { return !table_.holds_any(worker, to.owed.front()); };
    if (!all && !merged()) return;
    wait_until_merged(lock, worker, to.owed.front());
    const torch::Tensor values = read(worker, to.owed.front());
    lock.unlock();
    if (values.numel() > 0) to.answers.push_back(to.link.start_sending(values));
    to.owed.pop_front();
  }
  if (!all) return;
  for (Work& answer : to.answers) answer.wait();
  to.answers.clear();
}

// dist_sync: with the last worker's push all of them are applied.
void KVServer::merge(const QuestionHeader& question, SliceRange slices) {
  std::vector<int> workers(options_.workers.size());
  std::iota(workers.begin(), workers.end(), 0);
  std::vector<std::int64_t> delays;
  for (const int worker : workers) delays.push_back(table_.delay(worker, slices));
  table_.merge_complete(slices, workers, question.learning_rate);
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
    statistics_.add_gradient(question, table_.delay(worker, question.slices));
    statistics_.add_update(question.samples);
    gate_.update(worker);
  }
  table_.apply(worker, question.slices, question.learning_rate);
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

// With the lock held: a copy that may travel without it.
torch::Tensor KVServer::read(int worker, SliceRange slices) {
  const torch::Tensor region = table_.layout().region_of(slices, client(worker).outbox);
  torch::Tensor(region).copy_(table_.layout().region_of(slices, table_.values()));
  table_.mark_read(worker, slices);
  return region;
}

void KVServer::pull(int worker, const QuestionHeader& question) {
  Lock lock(mutex_);
  wait_until_merged(lock, worker, question.slices);
  if (question.trained != 0) wait_for_turn_to_read(lock, worker);
  const torch::Tensor region = read(worker, question.slices);
  if (question.trained != 0) gate_.read(worker);
  changed_.notify_all();
  lock.unlock();
  client(worker).link.send(AnswerHeader{});
  client(worker).link.send_bytes(region);
}

void KVServer::wait_for_turn_to_read(Lock& lock, int worker) {
  gate_.ask_to_read(worker);
  changed_.notify_all();  // its update is everywhere now
  wait(lock, "its turn to read", [&] { return gate_.may_read(worker); });
}

void KVServer::pull_rows(int worker, const QuestionHeader& question) {
  const Link& link = client(worker).link;
  const torch::Tensor rows = torch::empty({question.count}, torch::kInt64);
  link.receive_bytes(rows.view(torch::kUInt8));
  Lock lock(mutex_);
  wait_until_merged(lock, worker, question.slices);
  // A key's slices follow each other without a gap; question.bytes: of a row
  const torch::Tensor region = table_.layout().region_of(question.slices, table_.values());
  const torch::Tensor values = region.view({-1, question.bytes}).index_select(0, rows);
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
