// SPDX-License-Identifier: Apache-2.0
// How each communication hook (lockstep/communication_hook.h) exchanges buckets between machines.
#include "lockstep/plan/strategy_schedules.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep::plan {
namespace {

bool gathers(Compression kind) { return kind == Compression::kTwoBit || kind == Compression::kTopK; }

void process_on_all(Builder& b, const char* name, double seconds) {
  for (const int device : b.all_devices()) b.process(device, b.machine_of(device), name, seconds);
}

// Every rank has `bytes`, and gets those of all ranks. Its devices wait for it.
void all_gather(Builder& b, const Ids& networks, double bytes) {
  const int inside = b.target().devices;
  const std::vector<Ids> ready = last_of_machines(b);
  Ids arrived;
  for (int m = 0; m < b.machines(); ++m) {
    const Ids gathered = inside > 1 ? Ids{b.pass(m, 2 * bytes * inside, ready[to_size(m)])} : ready[to_size(m)];
    arrived.push_back(b.exchange(networks[to_size(m)], m, "exchange", {bytes * inside}, gathered));
  }
  const int all = b.join(arrived);
  for (int m = 0; m < b.machines(); ++m)
    b.meet(b.devices_on(m), b.barrier(), {inside > 1 ? b.pass(m, 2 * bytes * b.devices() * inside, {all}) : all});
}

// In step: its devices wait for it.
void all_reduce_in_step(Builder& b, const Ids& networks, double bytes) {
  all_reduce(b, networks, bytes, last_of_machines(b));
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), 0, b.last(networks[to_size(m)]));
}

// PowerSGD: what is no matrix, P and Q are all-reduced one after the other, about a third of the bytes each.
void power_sgd(Builder& b, const Ids& networks, const CompressionTimes& times, double bytes) {
  constexpr int kRounds = 3;
  for (int round = 0; round < kRounds; ++round) {
    process_on_all(b, "decode", bytes * times.decode / kRounds);
    all_reduce_in_step(b, networks, bytes * times.sent / kRounds);
  }
}

}  // namespace

// A full bucket is encoded by the thread that computes backward. Sixteen bits are then summed beside backward; with two bits
// and top-k backward waits until all ranks have exchanged theirs; PowerSGD begins after backward.
void ddp_compressed(Builder& b, const Ids& networks) {
  const Compression kind = b.choice().compression;
  const CompressionTimes& times = compression_for(b.profile(), name_of(kind));
  forward_and_totals(b, networks);
  const auto buckets = buckets_of(b.profile(), b.choice().bucket_bytes);
  std::vector<std::vector<Ids>> full;
  backward_into_buckets(b, buckets, [&](const FullBucket& bucket) {
    process_on_all(b, "encode", bucket.bytes * times.encode);
    const int messages = kind == Compression::kTopK ? 2 : 1;  // places and values
    for (int i = 0; i < messages && gathers(kind); ++i) all_gather(b, networks, bucket.bytes * times.sent / messages);
    full.push_back(last_of_machines(b));
  });
  const bool is_summed_beside = !gathers(kind) && kind != Compression::kPowerSGD;
  if (is_summed_beside) {
    for (std::size_t i = 0; i < buckets.size(); ++i) all_reduce(b, networks, buckets[i].bytes * times.sent, full[i]);
    for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), 0, b.last(networks[to_size(m)]));
  }
  for (const FullBucket& bucket : buckets) {
    if (kind == Compression::kPowerSGD)
      power_sgd(b, networks, times, bucket.bytes);
    else
      process_on_all(b, "decode", bucket.bytes * times.decode * (gathers(kind) ? b.devices() : 1));
  }
  update_on_machines(b, last_of_machines(b));
}

}  // namespace lockstep::plan
