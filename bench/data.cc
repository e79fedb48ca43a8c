// `lockstep bench data`: loading beside PyTorch's DataLoader and torchvision, packed records beside the disk and the
// page cache, and a LeNet step with loading beside one without; in turn, medians.
#include <iostream>

#include "bench/benchmarks.h"
#include "bench/command_line.h"
#include "bench/data/measure.h"
#include "bench/python_peer.h"
#include "bench/report.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/datasets.h"
#include "lockstep/error.h"
#include "lockstep/images.h"

namespace lockstep::bench {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct Options {
  int turns = 3;
  int photographs = 512;
  double packed_mib = 2048;
  bool with_pytorch = true;
  fs::path scratch = fs::temp_directory_path();
  std::string json;
};

// A folder for what the benchmark writes, gone afterwards.
class ScratchFolder {
 public:
  explicit ScratchFolder(const fs::path& in) {
    std::string pattern = (in / "lockstep-bench-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw system_error("make a folder in", in);
    path_ = pattern;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

// Samples per second of each epoch that data-pytorch.py runs; none where PyTorch is not here.
std::vector<double> peer_rates(const Options& options, const std::vector<std::string>& arguments) {
  if (!options.with_pytorch) return {};
  return Json::parse(run_python("data-pytorch.py", arguments)).at("rates").get<std::vector<double>>();
}

void append(std::vector<double>& all, const std::vector<double>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

class Report {
 public:
  explicit Report(const Options& options) : options_(options) {}

  // Each line: what was measured, its rate, and how many times the last one's it is.
  void add(const std::string& what, const std::vector<double>& values, double base, int digits = 0, double unit = 1) {
    if (values.empty()) return lines_.add({what, "not measured", ""});
    const double found = median(values);
    lines_.add({what, digits == 0 ? with_thousands(std::llround(found / unit)) : fixed(found / unit, digits),
                base > 0 ? concat(fixed(found / base, 2), "x") : ""});
    json_[what] = values;
  }
  void print(const std::string& title) {
    std::cout << '\n' << title << '\n';
    lines_.print(std::cout);
    lines_ = Table({"", "median", "of the first"});
  }
  void save() const {
    if (!options_.json.empty()) bench::save(options_.json, json_);
  }

 private:
  const Options& options_;
  Table lines_{{"", "median", "of the first"}};
  Json json_;
};

double first_median(const std::vector<double>& values) { return values.empty() ? 0 : median(values); }

void bench_fashion(const Options& options, Report& report) {
  const auto dataset = std::make_shared<FashionMNIST>();
  const std::string folder = FashionMNIST::kDebianFolder;
  const auto file = [&](const std::string& name) {
    return fs::exists(fs::path(folder) / name) ? concat(folder, "/", name) : concat(folder, "/", name, ".gz");
  };
  const auto peer = [&](int workers) {
    return peer_rates(
        options, {"fashion", file("train-images-idx3-ubyte"), file("train-labels-idx1-ubyte"), concat(workers), "1"});
  };
  std::vector<double> theirs;
  std::vector<double> theirs_two;
  std::vector<double> here;
  std::vector<double> one;
  for (int turn = 0; turn < options.turns; ++turn) {
    append(theirs, peer(0));
    append(here, epoch_rates(dataset, 0, 3));
    append(theirs_two, peer(2));
    append(one, epoch_rates(dataset, 1, 3));
  }
  report.add("DataLoader, in process", theirs, 0);
  report.add("DataLoader, 2 workers", theirs_two, first_median(theirs));
  report.add("lockstep, in the training thread", here, first_median(theirs));
  report.add("lockstep, 1 worker", one, first_median(theirs));
  report.print("Fashion-MNIST, batches of 256, shuffled, normalised: images/s");

  const std::vector<double> bytes = memory_after_epochs(dataset, 1, 10);
  std::cout << "memory after epoch 1: " << human_bytes(static_cast<std::uint64_t>(bytes.front()))
            << ", after epoch 10: " << human_bytes(static_cast<std::uint64_t>(bytes.back())) << '\n';
}

void bench_jpeg(const Options& options, const ScratchFolder& scratch, Report& report) {
  const fs::path folder = scratch / "photographs";
  write_photographs(folder, options.photographs);
  const int cores = static_cast<int>(usable_cores().size());
  const auto dataset = std::make_shared<ImageDataset>(
      std::make_shared<ImageFolder>(folder),
      parse_transforms("random-resized-crop:224,flip,normalise:0.485+0.456+0.406:0.229+0.224+0.225", {}));
  std::vector<double> theirs;
  std::vector<double> ours;
  for (int turn = 0; turn < options.turns; ++turn) {
    append(theirs, peer_rates(options, {"jpeg", folder.string(), concat(cores), "1"}));
    append(ours, epoch_rates(dataset, cores, 1, 32));
  }
  report.add(concat("torchvision and DataLoader, ", cores, " workers"), theirs, 0);
  report.add(concat("lockstep, ", cores, " workers"), ours, first_median(theirs));
  report.print("JPEG of 500 x 375, random-resized crop to 224, flip, normalise, batches of 32: images/s");
}

void bench_packed(const Options& options, const ScratchFolder& scratch, Report& report) {
  const fs::path folder = scratch / "packed";
  write_records(folder, static_cast<std::uint64_t>(options.packed_mib * 1024 * 1024));
  for (const bool cold : {false, true}) {
    std::vector<double> plain;
    std::vector<double> records;
    for (int turn = 0; turn < options.turns + 1; ++turn) {
      const double file = file_rate(folder, cold);
      const double record = record_rate(folder, cold, static_cast<std::uint64_t>(turn));
      if (turn == 0) continue;  // fills the page cache
      plain.push_back(file);
      records.push_back(record);
    }
    const std::string from = cold ? "disk" : "page cache";
    report.add(concat("read() of the shards, ", from), plain, 0, 2, 1e9);
    report.add(concat("records, shuffled, checksums compared, ", from), records, median(plain), 2, 1e9);
  }
  report.print("Packed records of 112 KiB, one thread: GB/s");
}

void bench_step(const Options& options) {
  const int cores = static_cast<int>(usable_cores().size());
  const StepSeconds found = lenet_step(cores, 3 * options.turns);
  std::cout << "\nLeNet step, batch 256, " << cores << " ranks of one thread and one core\n"
            << "on one repeated batch  " << human_seconds(found.repeated) << "\nwith loading           "
            << human_seconds(found.loaded) << "  " << fixed(100 * (found.loaded / found.repeated - 1), 1)
            << " % more\n";
}

}  // namespace

int bench_data(int argc, const char* const* argv) {
  Options options;
  CLI::App app("Loading beside PyTorch's DataLoader and torchvision", "lockstep bench data");
  app.add_option("--turns", options.turns, "how often each is measured")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--photographs", options.photographs, "JPEG files to make")
      ->check(CLI::Range(2, 1000000))
      ->capture_default_str();
  app.add_option("--packed-mib", options.packed_mib, "packed records to write")
      ->check(CLI::Range(1.0, 1e7))
      ->capture_default_str();
  app.add_option("--scratch", options.scratch, "folder for them")->capture_default_str();
  app.add_option("--json", options.json, "file to keep the figures in");
  if (const auto exit_code = parse(app, argc, argv)) return *exit_code;
  std::cout << machine() << '\n';
  const std::string missing = why_no_python("torch, torchvision");
  if (!missing.empty()) std::cout << "PyTorch is not measured: " << missing << '\n';
  options.with_pytorch = missing.empty();
  Report report(options);
  const ScratchFolder scratch(options.scratch);
  bench_fashion(options, report);
  bench_jpeg(options, scratch, report);
  bench_packed(options, scratch, report);
  bench_step(options);
  report.save();
  return 0;
}

}  // namespace lockstep::bench
