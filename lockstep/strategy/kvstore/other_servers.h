// strategy/kvstore/other_servers.h: the first server's links to the others. S2.
//
// The first server asks for the others' slices only when it validates or saves. In between a thread lets them know that
// it lives: a server takes a client that says nothing for too long for lost.
//
// Flow:    kvstore_dist_server.cc -> here -> messages.h -> server.h
// Owns:    the links, the thread
// Threads: for_each() from one
// Ranks:   the first server
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/strategy/kvstore/messages.h"

namespace lockstep {

class OtherServers {
 public:
  // every: how often they hear of it, at least.
  OtherServers(std::vector<Link> links, std::chrono::milliseconds every);
  ~OtherServers();  // says goodbye, unless an exception is on its way out
  OtherServers(const OtherServers&) = delete;
  OtherServers& operator=(const OtherServers&) = delete;

  // Talks to one after the other. Throws what `talk` throws.
  void for_each(const std::function<void(const Link&)>& talk);

 private:
  struct Other {
    Link link;
    std::mutex in_use{};
  };

  void keep_in_touch(std::chrono::milliseconds every);

  std::vector<std::unique_ptr<Other>> others_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace lockstep
