// SPDX-License-Identifier: Apache-2.0
// `lockstep bench data`: loading beside PyTorch's DataLoader and torchvision, and shards of WebDataset beside the
// disk and the page cache; in turn, medians.
#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <iostream>

#include <ATen/Parallel.h>

#include "bench/harness.h"
#include "bench/processes.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/data/webdataset/shards.h"
#include "lockstep/datasets.h"
#include "lockstep/deadline.h"
#include "lockstep/images.h"
#include "lockstep/loader.h"
#include "lockstep/models.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy.h"
#include "tests/data/encode_jpeg.h"

namespace lockstep::bench {
namespace {

// ---- the measurements, each of lockstep alone

constexpr int64_t kBatch = 256;

double run_epoch(Loader& loader, int64_t epoch) {
  const Stopwatch watch;
  int64_t samples = 0;
  for (const Batch& batch : loader.epoch(epoch)) samples += batch.size();
  return static_cast<double>(samples) / watch.seconds();
}

// Waves with noise: about as many bytes as a photograph of this size has.
std::vector<uint8_t> photograph(int64_t height, int64_t width, int64_t index) {
  SampleRandom random(7, index);
  const double down = random.uniform(0.01, 0.1);
  const double across = random.uniform(0.01, 0.1);
  std::vector<uint8_t> pixels;
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x)
      for (int c = 0; c < 3; ++c)
        pixels.push_back(static_cast<uint8_t>(
            110 + 80 * std::sin(down * static_cast<double>(y) + across * static_cast<double>(x) + c) + random() % 24));
  return pixels;
}

template <class Visit>
void for_each_shard(const std::filesystem::path& folder, Visit&& visit) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const UniqueFd fd(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) throw system_error("open", entry.path());
    visit(fd.get());
  }
}

void drop_from_page_cache(const std::filesystem::path& folder) {
  for_each_shard(folder, [](int fd) { ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); });
}

// Samples per second of one epoch after another, the first left out; shuffled.
std::vector<double> epoch_rates(const std::shared_ptr<const Dataset>& dataset, int workers, int epochs,
                                int64_t batch_size = 256) {
  Loader loader(World::single(), dataset, {.batch_size = batch_size, .seed = 1, .workers = workers, .prefetch = 4});
  run_epoch(loader, 0);
  std::vector<double> rates;
  for (int epoch = 1; epoch <= epochs; ++epoch) rates.push_back(run_epoch(loader, epoch));
  return rates;
}

// FOLDER/CLASS/N.jpg: synthetic photographs of 500 x 375 pixels.
void write_photographs(const std::filesystem::path& folder, int count) {
  constexpr int64_t kHeight = 375;
  constexpr int64_t kWidth = 500;
  for (int i = 0; i < count; ++i) {
    const auto in = folder / (i % 2 == 0 ? "even" : "odd");
    std::filesystem::create_directories(in);
    const auto file = testing::encode_jpeg(photograph(kHeight, kWidth, i), kHeight, kWidth, 90);
    std::ofstream out(in / (std::to_string(i) + ".jpg"), std::ios::binary);
    out.write(reinterpret_cast<const char*>(file.data()), static_cast<std::streamsize>(file.size()));
    if (!out) throw system_error("write", in);
  }
}

// FOLDER: shards of samples of 112 KiB, `bytes` in all.
void write_shards(const std::filesystem::path& folder, uint64_t bytes) {
  std::vector<uint8_t> payload(size_t{112} << 10);
  ShardWriter writer(folder);
  for (uint64_t i = 0; i * payload.size() < bytes; ++i) {
    SampleRandom random(3, static_cast<int64_t>(i));
    for (uint8_t& byte : payload) byte = static_cast<uint8_t>(random());
    writer.add({.target = 0, .encoded = true, .payload = payload});
  }
  writer.finish({.name = "shards", .classes = 1});
}

// Bytes per second of one thread; shuffled, with checksums. With `cold`, the files are dropped from the page cache first.
double shard_rate(const std::filesystem::path& folder, bool cold, uint64_t seed) {
  constexpr int64_t kWindow = 1024;
  constexpr int64_t kAhead = 64;
  if (cold) drop_from_page_cache(folder);
  const Stopwatch watch;
  const ShardReader samples(folder);
  const auto order = window_order(samples.shard_sizes(), kWindow)->draw(seed, 0);
  uint64_t bytes = 0;
  std::vector<uint8_t> scratch;
  const auto part = [&](int64_t begin) {
    const int64_t end = std::min(begin + kAhead, samples.size());
    std::vector<int64_t> batch(std::max<int64_t>(end - begin, 0));
    order(begin, batch);
    return batch;
  };
  for (int64_t begin = 0; begin < samples.size(); begin += kAhead) {
    samples.will_read(part(begin + kAhead));
    for (const int64_t index : part(begin)) bytes += samples.read(index, scratch).payload.size();
  }
  return static_cast<double>(bytes) / watch.seconds();
}

// The same of read() on the same files.
double file_rate(const std::filesystem::path& folder, bool cold) {
  if (cold) drop_from_page_cache(folder);
  std::vector<char> buffer(size_t{1} << 20);
  double bytes = 0;
  const Stopwatch watch;
  for_each_shard(folder, [&](int fd) {
    for (;;) {
      const ssize_t got = ::read(fd, buffer.data(), buffer.size());
      if (got <= 0) return;
      bytes += static_cast<double>(got);
    }
  });
  return bytes / watch.seconds();
}

// ---- the comparison

namespace fs = std::filesystem;

struct DataOptions {
  int photographs = 512;
  double shards_mib = 2048;
  bool with_pytorch = true;
  fs::path scratch = fs::temp_directory_path();
};

// Samples per second of each epoch that bench/peers/data.py runs; none where PyTorch is not here.
std::vector<double> peer_rates(const DataOptions& options, const std::vector<std::string>& arguments) {
  if (!options.with_pytorch) return {};
  return Json::parse(run_python("peers/data.py", arguments)).at("rates").get<std::vector<double>>();
}

// What is measured in turn with others; each turn gives no figure, one or several.
struct Contender {
  std::string name;
  std::function<Turns(int turn)> measure;
};

class Report {
 public:
  explicit Report(const Program& program) : program_(program) {}

  // Adds a line for each contender: its median in `unit`, and how many times that of the first it is.
  void compare(const std::string& what, const std::vector<Contender>& all, int digits = 0, double unit = 1) {
    std::vector<Turns> found(all.size());
    program_.take_turns(what, [&](int turn) {
      for (size_t i = 0; i < all.size(); ++i) std::ranges::copy(all[i].measure(turn), std::back_inserter(found[i]));
    });
    for (size_t i = 0; i < all.size(); ++i) add(all[i].name, found[i], i == 0 ? Turns{} : found[0], digits, unit);
  }
  void print(const std::string& title) {
    std::cout << '\n' << title << '\n';
    lines_.print(std::cout);
    lines_ = new_table();
  }
  void save() const { program_.save(json_); }

 private:
  static Table new_table() { return Table({"", "median", "of the first"}); }

  void add(const std::string& what, const Turns& values, const Turns& base, int digits, double unit) {
    if (values.empty()) return lines_.add({what, "not measured", ""});
    const double found = median(values) / unit;
    lines_.add({what, digits == 0 ? with_thousands(std::llround(found)) : fixed(found, digits),
                base.empty() ? "" : times(found * unit / median(base))});
    json_[what] = values;
  }

  const Program& program_;
  Table lines_ = new_table();
  Json json_;
};

void bench_fashion(const DataOptions& options, Report& report) {
  const auto dataset = std::make_shared<FashionMNIST>();
  const auto peer = [&](const char* workers) { return peer_rates(options, {"fashion", workers, "1"}); };
  report.compare("Fashion-MNIST",
                 {{"DataLoader, in process", [&](int) { return peer("0"); }},
                  {"DataLoader, 2 workers", [&](int) { return peer("2"); }},
                  {"lockstep, in the training thread", [&](int) { return epoch_rates(dataset, 0, 3); }},
                  {"lockstep, 1 worker", [&](int) { return epoch_rates(dataset, 1, 3); }}});
  report.print("Fashion-MNIST, batches of 256, shuffled, normalised: images/s");
}

void bench_jpeg(const DataOptions& options, const TemporaryFolder& scratch, Report& report) {
  const fs::path folder = scratch.file("photographs");
  write_photographs(folder, options.photographs);
  const int cores = static_cast<int>(usable_cores().size());
  const auto dataset = std::make_shared<ImageDataset>(
      std::make_shared<ImageFolder>(folder),
      parse_transforms("random-resized-crop:224,flip,normalise:0.485+0.456+0.406:0.229+0.224+0.225", {}));
  const auto theirs = [&](int) { return peer_rates(options, {"jpeg", folder.string(), concat(cores), "1"}); };
  report.compare("JPEG",
                 {{concat("torchvision and DataLoader, ", cores, " workers"), theirs},
                  {concat("lockstep, ", cores, " workers"), [&](int) { return epoch_rates(dataset, cores, 1, 32); }}});
  report.print("JPEG of 500 x 375, random-resized crop to 224, flip, normalise, batches of 32: images/s");
}

void bench_shards(const DataOptions& options, const TemporaryFolder& scratch, Report& report) {
  const fs::path folder = scratch.file("shards");
  write_shards(folder, static_cast<uint64_t>(options.shards_mib * 1024 * 1024));
  for (const bool cold : {false, true}) {
    const std::string from = cold ? "disk" : "page cache";
    file_rate(folder, cold);  // fills the page cache
    shard_rate(folder, cold, 0);
    const auto samples = [&](int turn) { return Turns{shard_rate(folder, cold, static_cast<uint64_t>(turn) + 1)}; };
    report.compare(concat("shards, ", from),
                   {{concat("read() of the shards, ", from), [&](int) { return Turns{file_rate(folder, cold)}; }},
                    {concat("samples, shuffled, checksums compared, ", from), samples}},
                   2, 1e9);
  }
  report.print("Shards of WebDataset, samples of 112 KiB, one thread: GB/s");
}

}  // namespace

int bench_data(int argc, const char* const* argv) {
  DataOptions options;
  Program program("data", "Loading beside PyTorch's DataLoader and torchvision", 3);
  program.option("--photographs", options.photographs, "JPEG files to make")->check(CLI::Range(2, 1000000));
  program.option("--shards-mib", options.shards_mib, "shards to write")->check(CLI::Range(1.0, 1e7));
  program.option("--scratch", options.scratch, "folder for them");
  return program.run(argc, argv, [&] {
    std::cout << machine() << '\n';
    const std::string missing = why_no_python("torch, torchvision");
    if (!missing.empty()) std::cout << "PyTorch is not measured: " << missing << '\n';
    options.with_pytorch = missing.empty();
    Report report(program);
    const TemporaryFolder scratch(options.scratch);
    bench_fashion(options, report);
    bench_jpeg(options, scratch, report);
    bench_shards(options, scratch, report);
    report.save();
  });
}

}  // namespace lockstep::bench
