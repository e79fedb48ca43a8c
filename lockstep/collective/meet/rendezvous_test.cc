// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/meet/rendezvous.h"

#include <dlfcn.h>
#include <netdb.h>

#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <thread>

#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/meet/job_store.h"
#include "lockstep/deadline.h"
#include "tests/support.h"

namespace lockstep::testing {
namespace {

// A name server: "later.test" is known from the third question on, "hangs.test" gets no answer until the test is over.
struct NameServer {
  std::mutex mutex;
  std::condition_variable changed;
  int questions = 0;
  int waiting = 0;
  bool over = false;
} name_server;

}  // namespace
}  // namespace lockstep::testing

// In place of libc's, which answers everything else.
extern "C" __attribute__((visibility("default"))) int getaddrinfo(const char* host, const char* port,
                                                                  const addrinfo* hints, addrinfo** found) {
  auto& server = lockstep::testing::name_server;
  const std::string_view name(host != nullptr ? host : "");
  std::unique_lock lock(server.mutex);
  if (name == "later.test" && ++server.questions < 3) return EAI_NONAME;
  if (name == "hangs.test") {
    ++server.waiting;
    server.changed.wait(lock, [&] { return server.over; });
    --server.waiting;
    server.changed.notify_all();
    return EAI_FAIL;
  }
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto libc = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  return libc(name.ends_with(".test") ? "127.0.0.1" : host, port, hints, found);
}

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::contains;
using testing::message_of;

constexpr milliseconds kPatience = std::chrono::seconds(20);

struct Jobs : ::testing::Test {
  Jobs() { ::setenv("LOCKSTEP_SECRET", std::string(64, 'c').c_str(), 1); }
  ~Jobs() override { ::unsetenv("LOCKSTEP_SECRET"); }
  JobEnvironment job(int rank, const std::string& name, int size = 2) const {
    JobEnvironment environment;
    environment.rank = environment.local_rank = rank;
    environment.world_size = environment.local_size = size;
    environment.master_addr = "127.0.0.1";
    environment.master_port = port.number();
    environment.job_name = name;
    return environment;
  }
  static std::string refusal(const JobEnvironment& job) {
    return message_of<RendezvousError>([&] { connect_at_address(job, kPatience); });
  }
  ReservedPort port;
};

TEST_F(Jobs, a_second_one_with_the_same_port_is_told_so_at_once) {
  const Stopwatch watch;
  const auto rank_0 = connect_at_address(job(0, "one"), kPatience);
  EXPECT_TRUE(contains(refusal(job(0, "two")), "another job, or an old one that is still running, uses this port"));
  EXPECT_TRUE(contains(refusal(job(1, "two")), "a job of 2 ranks (one)"));
  EXPECT_TRUE(contains(refusal(job(1, "one", 3)), "a job of 2 ranks (one)"));
  const auto rank_1 = connect_at_address(job(1, "one"), kPatience);
  rank_0->set("key", "value");
  EXPECT_EQ(rank_1->get("key").size(), 5U) << "the first job is not disturbed";
  EXPECT_LT(watch.seconds(), 10) << "far below the timeout";
}

TEST_F(Jobs, without_a_name_are_told_apart_by_a_rank_that_comes_twice) {
  const auto rank_0 = connect_at_address(job(0, ""), kPatience);
  const auto rank_1 = connect_at_address(job(1, ""), kPatience);
  const std::string message = refusal(job(1, ""));
  EXPECT_TRUE(contains(message, "rank 1 met another rank 1"));
  EXPECT_TRUE(contains(message, concat("pid ", ::getpid(), " on ")));
  EXPECT_TRUE(contains(message, "two jobs with one MASTER_PORT"));
}

TEST_F(Jobs, say_that_their_port_is_taken) {
  const UniqueFd other = listen_on({"127.0.0.1", port.number()}, Deadline::after(kPatience));
  const std::string message = refusal(job(0, ""));
  EXPECT_TRUE(contains(message, concat("rank 0 can't listen on 127.0.0.1:", port.number())));
  EXPECT_TRUE(contains(message, "choose another MASTER_PORT"));
}

TEST_F(Jobs, give_up_at_the_deadline_where_nobody_answers) {
  const std::string message = message_of<RendezvousError>([&] { connect_at_address(job(1, ""), milliseconds(100)); });
  EXPECT_TRUE(contains(message, concat("rank 1 got no answer at 127.0.0.1:", port.number())));
}

TEST_F(Jobs, that_are_complete_let_nobody_else_in) {
  const auto rank_0 = connect_at_address(job(0, ""), kPatience);
  const auto rank_1 = connect_at_address(job(1, ""), kPatience);
  let_nobody_else_in(*rank_0);
  EXPECT_FALSE(connect_to(address_of_number({"127.0.0.1", port.number()}), Deadline::after(kPatience)));
  rank_1->set("key", "value");
  EXPECT_EQ(rank_0->get("key").size(), 5U);
}

TEST_F(Jobs, give_up_at_the_deadline_on_a_program_that_accepts_and_is_silent) {
  const UniqueFd silent = listen_on({"127.0.0.1", port.number()}, Deadline::after(kPatience));
  const std::string message = message_of<RendezvousError>([&] { connect_at_address(job(1, ""), milliseconds(300)); });
  EXPECT_TRUE(contains(message, "what listens there is not this job's store"));
}

TEST_F(Jobs, with_several_ports_skip_a_program_that_accepts_and_is_silent) {
  const UniqueFd silent = listen_on({"127.0.0.1", port.number()}, Deadline::after(kPatience));
  JobEnvironment first = job(0, "several"), second = job(1, "several");
  first.master_ports = second.master_ports = 16;
  const auto rank_0 = connect_at_address(first, kPatience);
  const auto rank_1 = connect_at_address(second, kPatience);
  rank_0->set("key", "value");
  EXPECT_EQ(rank_1->get("key").size(), 5U);
}

TEST_F(Jobs, wait_for_a_master_address_that_does_not_resolve_yet) {
  JobEnvironment late = job(0, "");
  late.master_addr = "later.test";
  EXPECT_TRUE(connect_at_address(late, kPatience));
  EXPECT_GE(testing::name_server.questions, 3);
}

TEST_F(Jobs, give_up_on_a_name_server_that_does_not_answer) {
  JobEnvironment stuck = job(1, "");
  stuck.master_addr = "hangs.test";
  const std::string message = message_of<RendezvousError>([&] { connect_at_address(stuck, milliseconds(100)); });
  EXPECT_TRUE(contains(message, "MASTER_ADDR=hangs.test: no answer before the deadline"));
  std::unique_lock lock(testing::name_server.mutex);
  testing::name_server.over = true;
  testing::name_server.changed.notify_all();
  testing::name_server.changed.wait(lock, [] { return testing::name_server.waiting == 0; });
}

TEST_F(Jobs, give_up_on_a_name_that_nobody_knows_at_the_deadline) {
  JobEnvironment wrong = job(1, "");
  wrong.master_addr = "no-such-host.invalid";
  const std::string message = message_of<RendezvousError>([&] { connect_at_address(wrong, milliseconds(300)); });
  EXPECT_TRUE(contains(message, "can't resolve MASTER_ADDR=no-such-host.invalid"));
}

}  // namespace
}  // namespace lockstep
