#include "lockstep/strategy/kvstore/other_servers.h"

#include <exception>

namespace lockstep {
namespace {

// One that is gone ends the workers, and they this server.
void tell(const Link& link, Question what) {
  try {
    link.send(QuestionHeader{.question = what});
  } catch (const std::exception&) {
  }
}

}  // namespace

OtherServers::OtherServers(std::vector<Link> links, std::chrono::milliseconds every) {
  for (Link& link : links) others_.push_back(std::make_unique<Other>(std::move(link)));
  if (!others_.empty()) thread_ = std::thread([this, every] { keep_in_touch(every); });
}

OtherServers::~OtherServers() {
  const bool failed = std::uncaught_exceptions() > 0;
  if (failed)
    for (const auto& other : others_) other->link.abandon("the first server has failed");
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (const auto& other : others_)
    if (!failed) tell(other->link, Question::kGoodbye);
}

void OtherServers::for_each(const std::function<void(const Link&)>& talk) {
  for (const auto& other : others_) {
    const std::lock_guard lock(other->in_use);
    talk(other->link);
  }
}

// Who is talked to needs no more.
void OtherServers::keep_in_touch(std::chrono::milliseconds every) {
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, every, [this] { return stop_; }))
    for (const auto& other : others_)
      if (const std::unique_lock free(other->in_use, std::try_to_lock); free) tell(other->link, Question::kAlive);
}

}  // namespace lockstep
