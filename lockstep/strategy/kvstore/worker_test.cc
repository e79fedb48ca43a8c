// SPDX-License-Identifier: Apache-2.0
// A store on servers, whose ranks are threads, over each transport.
#include <atomic>
#include <mutex>
#include <thread>

#include "agent/start/launcher.h"
#include "lockstep/deadline.h"
#include "lockstep/strategy/kvstore/server.h"
#include "lockstep/strategy/kvstore/store.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Fabric;

struct Cluster {
  int servers = 1;
  int workers = 2;
  KVStoreKind kind = KVStoreKind::kDistSync;
  int64_t staleness = 0;
  int64_t split_above = 4;
  double threshold = 0;
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
};

using WorkerBody = std::function<void(Store& store, int worker)>;
using ServerBody = std::function<void(KVServer& server)>;

void run_cluster(Fabric fabric, const Cluster& cluster, const WorkerBody& work, const ServerBody& check = {}) {
  StrategyOptions options{.timeout = cluster.timeout,
                          .kvstore = {.kind = cluster.kind,
                                      .servers = cluster.servers,
                                      .staleness = cluster.staleness,
                                      .split_above = cluster.split_above}};
  if (cluster.threshold > 0) options.compression = {.kind = Compression::kTwoBit, .amount = cluster.threshold};
  testing::run_over(fabric, cluster.servers + cluster.workers,
                    [&](World& world) {
                      const DistSetting setting = connect_store(world, options);
                      if (setting.serves()) {
                        say_goodbye(setting.to_servers);
                        const auto server = make_kv_server(setting);
                        if (check) check(*server);
                      } else {
                        const auto store = make_kv_worker(setting, nullptr);
                        work(*store, setting.number);
                      }
                    },
                    {.timeout = cluster.timeout});
}

class DistStore : public ::testing::TestWithParam<std::tuple<Fabric, int, int>> {
 protected:
  Fabric fabric() const { return std::get<0>(GetParam()); }
  Cluster cluster() const { return {.servers = std::get<1>(GetParam()), .workers = std::get<2>(GetParam())}; }
};
INSTANTIATE_TEST_SUITE_P(Clusters, DistStore,
                         ::testing::Combine(::testing::Values(Fabric::kSharedMemory, Fabric::kHosts),
                                            ::testing::Values(1, 2), ::testing::Values(1, 3)),
                         [](const auto& test) {
                           return lockstep::concat(testing::name_of(std::get<0>(test.param)), "_",
                                                   std::get<1>(test.param), "_servers_", std::get<2>(test.param),
                                                   "_workers");
                         });

// Keys of several dtypes, split and whole; one worker's first values count.
TEST_P(DistStore, gives_every_worker_the_first_ones_values_then_the_weighted_mean) {
  run_cluster(fabric(), cluster(), [&](Store& store, int worker) {
    const auto w = static_cast<float>(worker);
    store.init(
        {{"a", torch::full({5, 2}, w)}, {"b", torch::full({3}, w)}, {"c", torch::full({7}, 2.0 + w, torch::kFloat64)}});
    const DeviceTensors into{{torch::ones({5, 2}), torch::ones({3}), torch::ones({7}, torch::kFloat64)}};
    store.pull({"a", "b", "c"}, into);
    EXPECT_TRUE(torch::equal(into[0][0], torch::zeros({5, 2})));
    EXPECT_TRUE(torch::equal(into[0][2], torch::full({7}, 2.0, torch::kFloat64)));
    // Two devices each: sums of 2 + 4 worker, weighed by 1, 2, 3, 4 samples.
    const DeviceTensors values{{torch::full({5, 2}, 2.0F), torch::full({7}, 2.0, torch::kFloat64)},
                               {torch::full({5, 2}, 4.0F * w), torch::full({7}, 4.0 * w, torch::kFloat64)}};
    store.push({"a", "c"}, values, {.samples = worker + 1});
    store.pull({"a", "b", "c"}, into);
    double sum = 0;
    double samples = 0;
    for (int each = 0; each < cluster().workers; ++each) {
      sum += (2 + 4.0 * each) * (each + 1);
      samples += each + 1;
    }
    EXPECT_TRUE(torch::allclose(into[0][0], torch::full({5, 2}, sum / samples, torch::kFloat32)));
    EXPECT_TRUE(torch::equal(into[0][1], torch::zeros({3})));
    EXPECT_TRUE(torch::allclose(into[0][2], torch::full({7}, sum / samples, torch::kFloat64), 1e-12));
  });
}

// As far with every kind: asynchronous workers each add their share of the learning rate. float32 values have an
// optimizer for each of them, bfloat16 one for all.
TEST_P(DistStore, updates_on_its_servers_with_every_kind) {
  for (const KVStoreKind kind : {KVStoreKind::kDistSync, KVStoreKind::kDistAsync, KVStoreKind::kDistBounded}) {
    Cluster here = cluster();
    here.kind = kind;
    here.staleness = 1;
    const auto dtype = kind == KVStoreKind::kDistBounded ? torch::kBFloat16 : torch::kFloat32;
    std::mutex mutex;
    run_cluster(
        fabric(), here,
        [&](Store& store, int) {
          const torch::Tensor a = torch::ones({6, 3}, dtype);
          const torch::Tensor b = torch::ones({2}, dtype);
          store.init({{"a", a - 1}, {"b", b - 1}}, {{"plain", torch::zeros({1})}});
          store.set_optimizer({.optimizer = SGDOptions{.lr = 1}});
          const DeviceTensors into{{a.clone(), b.clone(), torch::zeros({1})}};
          store.pull({"a", "b", "plain"}, into);
          for (int step = 0; step < 10; ++step) store.push_pull({"a", "b"}, {{a, b}}, {{into[0][0], into[0][1]}});
          store.push({"plain"}, {{torch::full({1}, 5.0F)}});
          store.pull({"plain"}, {{into[0][2]}});
          EXPECT_EQ(into[0][2].item<float>(), 5);
          if (kind == KVStoreKind::kDistSync) {
            EXPECT_TRUE(torch::equal(into[0][0], torch::full({6, 3}, -10.0F)));
          }
        },
        [&](KVServer& server) {
          server.wait_for_pushes(10);
          const std::lock_guard lock(mutex);
          const StoreStatistics found = server.statistics();
          const int updates = kind == KVStoreKind::kDistSync ? 10 : 10 * here.workers;
          EXPECT_EQ(found.updates, updates);
          EXPECT_EQ(found.delays.gradients(), 10 * here.workers);
          EXPECT_LE(found.delays.max(), kind == KVStoreKind::kDistSync      ? 0
                                        : kind == KVStoreKind::kDistBounded ? 1
                                                                            : 1000);
          for (const SliceState& slice : server.states())
            EXPECT_TRUE(slice.value.size(0) == 1 || torch::allclose(slice.value, torch::full_like(slice.value, -10)));
        });
  }
}

// The workers take turns with the gradient of 6 x^2, each n - 1 updates old. Momentum 0.9 that they share diverges with a
// learning rate of 0.05: for 2 workers from 2.2 x^2 on, for 4 from 1.5 x^2.
TEST(KVWorker, dist_async_gives_each_worker_its_share_and_a_momentum_of_its_own) {
  for (const int workers : {1, 2, 4}) {
    std::atomic<int> turn{0};
    std::vector<double> found;
    run_cluster(Fabric::kSharedMemory, {.workers = workers, .kind = KVStoreKind::kDistAsync},
                [&](Store& store, int worker) {
                  store.init({{"x", torch::ones({1}, torch::kFloat64)}});
                  store.set_optimizer({.optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9, .nesterov = workers == 1}});
                  const torch::Tensor x = torch::ones({1}, torch::kFloat64);
                  const auto deadline = Deadline::after(std::chrono::seconds(20));
                  for (int step = 0; step < 100; ++step) {
                    while (turn % workers != worker && !deadline.passed()) std::this_thread::yield();
                    store.push_pull({"x"}, {{12 * x}}, {{x}});
                    found.push_back(x.item<double>());
                    ++turn;
                  }
                });
    double x = 1;
    std::vector<double> read(workers, 1), momentum(workers, 0);
    for (int update = 0; update < 100 * workers; ++update) {
      const int worker = update % workers;
      const double gradient = 12 * read[worker];
      momentum[worker] = 0.9 * momentum[worker] + gradient;
      read[worker] = x -= 0.05 / workers * (gradient + 0.9 * momentum[worker]);
      ASSERT_NEAR(found.at(update), x, 1e-9) << workers << " workers, update " << update;
    }
    EXPECT_LT(std::abs(x), 1e-3);
  }
}

TEST_P(DistStore, pulls_rows_of_a_split_key) {
  run_cluster(fabric(), cluster(), [&](Store& store, int) {
    store.init({{"small", torch::ones({2})}, {"table", torch::arange(40, torch::kFloat32).view({10, 2, 2})}});
    const torch::Tensor rows = store.row_sparse_pull("table", torch::tensor({9, 0, 4, 4}));
    EXPECT_TRUE(torch::equal(
        rows, torch::arange(40, torch::kFloat32).view({10, 2, 2}).index_select(0, torch::tensor({9, 0, 4, 4}))));
    EXPECT_EQ(store.bytes_pulled(), 4 * 4 * 4);
    EXPECT_EQ(store.row_sparse_pull("table", torch::empty({0}, torch::kInt64)).size(0), 0);
  });
}

TEST_P(DistStore, sends_two_bits_per_element_and_the_rest_with_the_next_push) {
  Cluster here = cluster();
  here.threshold = 0.5;
  run_cluster(fabric(), here, [&](Store& store, int) {
    store.init({{"a", torch::zeros({32, 2})}});
    const torch::Tensor into = torch::zeros({32, 2});
    float sum = 0;
    for (int step = 0; step < 4; ++step) {
      store.push_pull({"a"}, {{torch::full({32, 2}, 0.375F)}}, {{into}});
      sum += into[0][0].item<float>();
      EXPECT_TRUE(torch::equal(into, torch::full({32, 2}, into[0][0].item<float>())));
    }
    EXPECT_EQ(sum, 1.5);  // 0, 0.5, 0.5, 0.5: nothing is lost
    EXPECT_LE(store.bytes_pushed(), 4 * (64 / 4 + 4 * here.servers));
  });
}

// A key without a value counts as zero; a key that no worker has a value for stays as it is.
TEST_P(DistStore, takes_values_that_only_some_workers_have) {
  run_cluster(fabric(), cluster(), [&](Store& store, int worker) {
    store.init({{"a", torch::zeros({4})}, {"b", torch::full({4}, 3.0F)}});
    const DeviceTensors into{{torch::zeros({4}), torch::zeros({4})}};
    store.push(KeyRange{0, 2}, {{worker == 0 ? torch::full({4}, 8.0F) : torch::Tensor(), torch::Tensor()}}, {});
    store.pull(KeyRange{0, 2}, into);
    EXPECT_TRUE(torch::equal(into[0][0], torch::full({4}, 8.0F / static_cast<float>(cluster().workers))));
    EXPECT_TRUE(torch::equal(into[0][1], torch::full({4}, 3.0F)));
  });
}

TEST(KVWorker, tells_each_worker_that_their_keys_differ) {
  std::atomic<int> told{0};
  const auto differ = [&](Store& store, int worker) {
    // The second worker is late: the first one's init() must not have returned.
    if (worker == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    try {
      store.init({{"a", torch::zeros({3 + worker})}});
    } catch (const Error& error) {
      EXPECT_TRUE(contains(error.what(), "other keys than the workers before it"));
      ++told;
    }
  };
  EXPECT_THROW(run_cluster(Fabric::kSharedMemory, {}, differ, [](KVServer& server) { server.wait_for_pushes(1); }),
               Error);
  EXPECT_EQ(told, 2);
}

TEST(KVWorker, refuses_what_servers_with_parts_of_keys_cannot_do) {
  run_cluster(Fabric::kSharedMemory, {.servers = 2}, [](Store& store, int) {
    store.init({{"a", torch::zeros({6})}});
    EXPECT_THROW(store.set_optimizer({.optimizer = LAMBOptions{}}), UsageError);
    EXPECT_THROW(store.set_optimizer({.clipping = {.max_norm = 1}}), UsageError);
  });
}

TEST(KVStore, is_made_on_workers_while_servers_serve) {
  std::atomic<int> servers{0};
  run_ranks(5, [&](World& world) {
    const auto store =
        KVStore::create(world, {.kvstore = {.kind = KVStoreKind::kDistSync, .servers = 2, .split_above = 4}});
    if (store == nullptr) {
      ++servers;
      return;
    }
    store->init({{"a", torch::zeros({6})}}, {{"counter", torch::zeros({1})}});
    store->set_optimizer({.optimizer = SGDOptions{.lr = 1}});
    const DeviceTensors into{{torch::zeros({6})}};
    for (int step = 1; step <= 3; ++step) {
      store->push_pull({"a"}, {{torch::ones({6})}}, into);
      EXPECT_TRUE(torch::equal(into[0][0], torch::full({6}, -static_cast<float>(step))));
    }
    EXPECT_EQ(store->bytes_pushed(), 3 * 6 * 4);
    EXPECT_EQ(store->rank(), world.rank() - 2);
    EXPECT_EQ(store->workers(), 3);
    store->barrier();
    EXPECT_EQ(store->delays().gradients, 3 * 3 * 2);  // both servers have a part of each
    EXPECT_EQ(store->delays().max, 0);
    EXPECT_THROW(store->push({"a"}, {{torch::ones({5})}}), UsageError);
    EXPECT_THROW(store->pull({"a"}, {{torch::ones({6}, torch::kFloat64)}}), UsageError);
  });
  EXPECT_EQ(servers, 2);
}

// Also among some of the ranks. They are started in a process of its own: one with threads should not fork.
TEST(KVStore, has_the_servers_that_the_launcher_has_started) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto rank = [] {
    const World all = World::from_env();
    for (const World& world : {all, *all.split(all.rank() % 2)}) {
      const auto store = KVStore::create("dist_sync", world);
      if ((store == nullptr) != (all.rank() < 2)) return 3;
    }
    return 0;
  };
  EXPECT_EXIT(std::exit(launch({.ranks = 4, .servers = 2}, rank).exit_code), ::testing::ExitedWithCode(0), "");
}

// ---- Who is slow or lost

struct Loss : std::runtime_error {
  Loss() : std::runtime_error("lost on purpose") {}
};

// The error that run_cluster throws, and the time it takes.
std::string trouble_of(const std::function<void()>& run, double longest) {
  const Stopwatch watch;
  std::string text;
  try {
    run();
  } catch (const std::exception& error) {
    text = error.what();
  }
  EXPECT_LT(watch.seconds(), longest);
  return text;
}

class StoreOver : public ::testing::TestWithParam<Fabric> {};
INSTANTIATE_TEST_SUITE_P(Fabrics, StoreOver, ::testing::Values(Fabric::kSharedMemory, Fabric::kHosts),
                         [](const auto& test) { return testing::name_of(test.param); });

void train(
    Store& store, int steps, const std::function<void(int step)>& before = [](int) {}) {
  store.init({{"a", torch::zeros({6})}});
  store.set_optimizer({.optimizer = SGDOptions{.lr = 1}});
  const DeviceTensors into{{torch::zeros({6})}};
  store.pull({"a"}, into);
  for (int step = 0; step < steps; ++step) {
    before(step);
    store.push_pull({"a"}, {{torch::ones({6})}}, into);
  }
}

TEST_P(StoreOver, dist_sync_ends_for_all_when_a_worker_is_lost) {
  std::mutex mutex;
  std::vector<std::string> said;
  const auto note = [&](const std::exception& error) {
    const std::lock_guard lock(mutex);
    said.emplace_back(error.what());
  };
  trouble_of(
      [&] {
        run_cluster(
            GetParam(), {.workers = 3},
            [&](Store& store, int worker) {
              try {
                train(store, 50, [&](int step) {
                  if (worker == 1 && step == 5) throw Loss();
                });
              } catch (const PeerLost& error) {
                note(error);
                throw;
              }
            },
            [&](KVServer& server) {
              try {
                server.wait_for_pushes(50);
              } catch (const PeerLost& error) {
                note(error);
                throw;
              }
            });
      },
      15);                     // a wait that nobody ends takes 30 s
  ASSERT_EQ(said.size(), 3U);  // the server and two workers
  int naming = 0;
  for (const std::string& text : said) naming += text.find("worker 1 (rank 2) is lost") != std::string::npos;
  EXPECT_GE(naming, GetParam() == Fabric::kSharedMemory ? 3 : 1) << said[0] << said[1] << said[2];
}

TEST_P(StoreOver, dist_async_goes_on_without_a_lost_worker) {
  int64_t updates = 0;
  const std::string text = trouble_of(
      [&] {
        run_cluster(
            GetParam(), {.workers = 3, .kind = KVStoreKind::kDistAsync},
            [&](Store& store, int worker) {
              train(store, 50, [&](int step) {
                if (worker == 1 && step == 5) throw Loss();
              });
            },
            [&](KVServer& server) {
              server.wait_for_pushes(50);
              updates = server.statistics().updates;
            });
      },
      15);  // a wait that nobody ends takes 30 s
  EXPECT_EQ(updates, 50 + 5 + 50);
  EXPECT_TRUE(contains(text, "lost on purpose"));  // nothing else went wrong
}

TEST_P(StoreOver, ends_when_the_server_is_lost) {
  int told = 0;
  std::mutex mutex;
  trouble_of(
      [&] {
        run_cluster(
            GetParam(), {.workers = 2, .kind = KVStoreKind::kDistAsync},
            [&](Store& store, int) {
              try {
                train(store, 1000000);
              } catch (const PeerLost& error) {
                const std::lock_guard lock(mutex);
                told += contains(error.what(), "a server of the store is lost") ? 1 : 0;
                throw;
              }
            },
            [](KVServer& server) {
              server.wait_for_pushes(20);
              throw Loss();
            });
      },
      15);  // a wait that nobody ends takes 30 s
  EXPECT_EQ(told, 2);
}

// A worker that stands still is lost after the timeout; until then dist_bounded waits for it.
TEST(KVWorker, dist_bounded_waits_for_a_stopped_worker_then_goes_on_without_it) {
  int64_t updates = 0;
  DelayHistogram delays;
  std::atomic<int> reading{0}, done{0};
  const std::string text = trouble_of(
      [&] {
        run_cluster(
            Fabric::kSharedMemory,
            {.workers = 3,
             .kind = KVStoreKind::kDistBounded,
             .staleness = 2,
             .timeout = std::chrono::milliseconds(1500)},
            [&](Store& store, int worker) {
              const std::shared_ptr<void> at_the_end(nullptr, [&](void*) { ++done; });
              train(store, 40, [&](int step) {
                if (step == 0) ++reading;
                while (reading < 3) std::this_thread::yield();  // a worker that has not read delays nobody
                while (worker == 1 && done < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
              });
            },
            [&](KVServer& server) {
              server.wait_for_pushes(40);
              updates = server.statistics().updates;
              delays = server.statistics().delays;
            });
      },
      8);
  EXPECT_EQ(updates, 40 + 40);
  EXPECT_LE(delays.max(), 2);
  EXPECT_GT(delays.mean(), 0);
}

// ---- Requests that can't be right. A worker sends them by hand; the server takes it for lost, and says why.

using Talk = std::function<void(const StoreLink& link)>;

std::string servers_trouble(const Talk& talk, KVStoreKind kind = KVStoreKind::kDistSync) {
  return trouble_of(
      [&] {
        const StrategyOptions options{.timeout = std::chrono::seconds(20), .kvstore = {.kind = kind, .servers = 1}};
        testing::run_over(Fabric::kSharedMemory, 2,
                          [&](World& world) {
                            const DistSetting setting = connect_store(world, options);
                            if (setting.serves())
                              make_kv_server(setting)->wait_for_goodbyes();
                            else
                              talk(setting.to_servers.front());
                          },
                          {.timeout = std::chrono::seconds(20)});
      },
      20);
}

// Keys of 4 floats each; the second one as `change` leaves it.
void init(const StoreLink& link, const std::function<void(Key&)>& change = {}) {
  std::vector<Key> keys{{.elements = 4, .rows = 4}, {.elements = 4, .rows = 4}};
  if (change) change(keys.back());
  link.send(RequestHeader{.request = Request::kInit, .count = 2, .bytes = 1000});
  link.send_all(std::span<const Key>(keys));
  if (change) return;
  link.send_bytes(torch::zeros({128}, torch::kUInt8));
  link.receive<ReplyHeader>();
}

TEST(KVServerChecks, the_keys) {
  struct Case {
    std::function<void(Key&)> change;
    const char* says;
  };
  for (const Case& each : {Case{[](Key& key) { key.elements = -4; }, "a key has -4 elements"},
                           Case{[](Key& key) { key.elements = int64_t{1} << 61; }, "this machine's memory"},
                           Case{[](Key& key) { key.rows = 0; }, "the rows of a key is 0, but must be 1 to 4"},
                           Case{[](Key& key) { key.rows = 8; }, "the rows of a key is 8"},
                           Case{[](Key& key) { key.rows = 3; }, "3 rows in 4 elements"},
                           Case{[](Key& key) { *reinterpret_cast<uint8_t*>(&key.trained) = 2; }, "is trained is 2"},
                           Case{[](Key& key) { key.dtype = torch::ScalarType(99); }, "a key of unknown dtype"}})
    EXPECT_TRUE(contains(servers_trouble([&](const StoreLink& link) {
                           init(link, each.change);
                           link.receive<ReplyHeader>();
                         }),
                         each.says));
  for (const auto& [request, says] :
       {std::pair{RequestHeader{.request = Request::kInit, .count = int64_t{1} << 60, .bytes = 1},
                  "the number of keys"},
        std::pair{RequestHeader{.request = Request::kInit, .count = 2, .bytes = 0}, "from which keys are split is 0"}})
    EXPECT_TRUE(contains(servers_trouble([&](const StoreLink& link) {
                           link.send(request);
                           link.receive<ReplyHeader>();
                         }),
                         says));
}

TEST(KVServerChecks, requests) {
  struct Case {
    RequestHeader request;
    const char* says;
  };
  for (const Case& each :
       {Case{{.request = static_cast<Request>(77)}, "a request is 77"},
        Case{{.request = Request::kPush, .slices = {0, 3}}, "the last slice is 3, but must be 0 to 2"},
        Case{{.request = Request::kPull, .slices = {2, 1}}, "the first slice is 2, but must be 0 to 1"},
        Case{{.request = Request::kPull, .slices = {0, ~size_t{0}}}, "the last slice is -1"},
        Case{{.request = Request::kPush, .slices = {0, 2}, .push = {.samples = -1}}, "the number of samples is -1"},
        Case{{.request = Request::kPush, .slices = {0, 2}, .threshold = 0.5}, "a threshold of 0.5"},
        Case{{.request = Request::kPullRows, .slices = {0, 0}, .count = 1, .bytes = 4}, "rows of no key"},
        Case{{.request = Request::kPullRows, .slices = {0, 1}, .count = 1, .bytes = 0}, "the bytes of a row is 0"},
        Case{{.request = Request::kPullRows, .slices = {0, 1}, .count = int64_t{1} << 60, .bytes = 4}, "rows has"}})
    EXPECT_TRUE(contains(servers_trouble([&](const StoreLink& link) {
                           init(link);
                           link.send(each.request);
                           link.receive<ReplyHeader>();
                         }),
                         each.says));
}

TEST(KVServerChecks, what_follows_a_request) {
  EXPECT_TRUE(
      contains(servers_trouble([](const StoreLink& link) {
                 init(link);
                 link.send(RequestHeader{.request = Request::kPullRows, .slices = {0, 1}, .count = 1, .bytes = 4});
                 link.send_bytes(torch::tensor({int64_t{4}}).view(torch::kUInt8));
                 link.receive<ReplyHeader>();
               }),
               "the first of the rows is 4, but must be 0 to 3"));
  EXPECT_TRUE(contains(servers_trouble([](const StoreLink& link) {
                         init(link);
                         UpdateOptions options{.optimizer = SGDOptions{.lr = std::nan("")}};
                         link.send(RequestHeader{.request = Request::kOptimizer});
                         link.send(options);
                         link.receive<ReplyHeader>();
                       }),
                       "lr is nan"));
  EXPECT_TRUE(contains(servers_trouble([](const StoreLink& link) {
                         link.send(RequestHeader{.request = Request::kPull});
                         link.receive<ReplyHeader>();
                       }),
                       "a request before the keys"));
}

}  // namespace
}  // namespace lockstep
