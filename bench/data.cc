// SPDX-License-Identifier: Apache-2.0
// `lockstep bench data`: loading beside PyTorch's DataLoader and torchvision, packed records beside the disk and the
// page cache, and a LeNet step with loading beside one without; in turn, medians.
#include <iostream>

#include "bench/benchmarks.h"
#include "bench/data/measure.h"
#include "bench/harness.h"
#include "bench/processes.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/datasets.h"
#include "lockstep/images.h"

namespace lockstep::bench {
namespace {

namespace fs = std::filesystem;

struct DataOptions {
  int photographs = 512;
  double packed_mib = 2048;
  bool with_pytorch = true;
  fs::path scratch = fs::temp_directory_path();
};

// Samples per second of each epoch that data-pytorch.py runs; none where PyTorch is not here.
std::vector<double> peer_rates(const DataOptions& options, const std::vector<std::string>& arguments) {
  if (!options.with_pytorch) return {};
  return Json::parse(run_python("data-pytorch.py", arguments)).at("rates").get<std::vector<double>>();
}

class Report {
 public:
  explicit Report(const Program& program) : program_(program) {}

  // Calls `turn` --turns times; it appends to the lists that add() gets afterwards.
  void take_turns(const std::string& what, const std::function<void(int)>& turn) { program_.take_turns(what, turn); }

  // A line: what was measured, its median in `unit`, and how many times that of `base` it is.
  void add(const std::string& what, const Turns& values, const Turns& base = {}, int digits = 0, double unit = 1) {
    if (values.empty()) return lines_.add({what, "not measured", ""});
    const double found = median(values) / unit;
    lines_.add({what, digits == 0 ? with_thousands(std::llround(found)) : fixed(found, digits),
                base.empty() ? "" : times(found * unit / median(base))});
    json_[what] = values;
  }
  void print(const std::string& title) {
    std::cout << '\n' << title << '\n';
    lines_.print(std::cout);
    lines_ = new_table();
  }
  void save() const { program_.save(json_); }

 private:
  static Table new_table() { return Table({"", "median", "of the first"}); }

  const Program& program_;
  Table lines_ = new_table();
  Json json_;
};

void append(Turns& all, const Turns& more) { all.insert(all.end(), more.begin(), more.end()); }

void bench_fashion(const DataOptions& options, Report& report) {
  const auto dataset = std::make_shared<FashionMNIST>();
  const std::string folder = FashionMNIST::kDebianFolder;
  const auto file = [&](const std::string& name) {
    return fs::exists(fs::path(folder) / name) ? concat(folder, "/", name) : concat(folder, "/", name, ".gz");
  };
  const auto peer = [&](int workers) {
    return peer_rates(
        options, {"fashion", file("train-images-idx3-ubyte"), file("train-labels-idx1-ubyte"), concat(workers), "1"});
  };
  Turns theirs, theirs_two, here, one;
  report.take_turns("Fashion-MNIST", [&](int) {
    append(theirs, peer(0));
    append(here, epoch_rates(dataset, 0, 3));
    append(theirs_two, peer(2));
    append(one, epoch_rates(dataset, 1, 3));
  });
  report.add("DataLoader, in process", theirs);
  report.add("DataLoader, 2 workers", theirs_two, theirs);
  report.add("lockstep, in the training thread", here, theirs);
  report.add("lockstep, 1 worker", one, theirs);
  report.print("Fashion-MNIST, batches of 256, shuffled, normalised: images/s");

  const std::vector<double> bytes = memory_after_epochs(dataset, 1, 10);
  std::cout << "memory after epoch 1: " << human_bytes(static_cast<std::uint64_t>(bytes.front()))
            << ", after epoch 10: " << human_bytes(static_cast<std::uint64_t>(bytes.back())) << '\n';
}

void bench_jpeg(const DataOptions& options, const TemporaryFolder& scratch, Report& report) {
  const fs::path folder = scratch.file("photographs");
  write_photographs(folder, options.photographs);
  const int cores = static_cast<int>(usable_cores().size());
  const auto dataset = std::make_shared<ImageDataset>(
      std::make_shared<ImageFolder>(folder),
      parse_transforms("random-resized-crop:224,flip,normalise:0.485+0.456+0.406:0.229+0.224+0.225", {}));
  Turns theirs, ours;
  report.take_turns("JPEG", [&](int) {
    append(theirs, peer_rates(options, {"jpeg", folder.string(), concat(cores), "1"}));
    append(ours, epoch_rates(dataset, cores, 1, 32));
  });
  report.add(concat("torchvision and DataLoader, ", cores, " workers"), theirs);
  report.add(concat("lockstep, ", cores, " workers"), ours, theirs);
  report.print("JPEG of 500 x 375, random-resized crop to 224, flip, normalise, batches of 32: images/s");
}

void bench_packed(const DataOptions& options, const TemporaryFolder& scratch, Report& report) {
  const fs::path folder = scratch.file("packed");
  write_records(folder, static_cast<std::uint64_t>(options.packed_mib * 1024 * 1024));
  for (const bool cold : {false, true}) {
    const std::string from = cold ? "disk" : "page cache";
    file_rate(folder, cold);  // fills the page cache
    record_rate(folder, cold, 0);
    Turns plain, records;
    report.take_turns(concat("records, ", from), [&](int turn) {
      plain.push_back(file_rate(folder, cold));
      records.push_back(record_rate(folder, cold, static_cast<std::uint64_t>(turn) + 1));
    });
    report.add(concat("read() of the shards, ", from), plain, {}, 2, 1e9);
    report.add(concat("records, shuffled, checksums compared, ", from), records, plain, 2, 1e9);
  }
  report.print("Packed records of 112 KiB, one thread: GB/s");
}

void bench_loading_step(int turns) {
  const int cores = static_cast<int>(usable_cores().size());
  const StepSeconds found = lenet_step(cores, 3 * turns);
  std::cout << "\nLeNet step, batch 256, " << cores << " ranks of one thread and one core\n"
            << "on one repeated batch  " << human_seconds(found.repeated) << "\nwith loading           "
            << human_seconds(found.loaded) << "  " << fixed(100 * (found.loaded / found.repeated - 1), 1)
            << " % more\n";
}

}  // namespace

int bench_data(int argc, const char* const* argv) {
  DataOptions options;
  Program program("data", "Loading beside PyTorch's DataLoader and torchvision", 3);
  program.option("--photographs", options.photographs, "JPEG files to make")->check(CLI::Range(2, 1000000));
  program.option("--packed-mib", options.packed_mib, "packed records to write")->check(CLI::Range(1.0, 1e7));
  program.option("--scratch", options.scratch, "folder for them");
  if (const auto exit_code = program.parse(argc, argv)) return *exit_code;
  std::cout << machine() << '\n';
  const std::string missing = why_no_python("torch, torchvision");
  if (!missing.empty()) std::cout << "PyTorch is not measured: " << missing << '\n';
  options.with_pytorch = missing.empty();
  Report report(program);
  const TemporaryFolder scratch(options.scratch);
  bench_fashion(options, report);
  bench_jpeg(options, scratch, report);
  bench_packed(options, scratch, report);
  bench_loading_step(program.turns());
  report.save();
  return 0;
}

}  // namespace lockstep::bench
