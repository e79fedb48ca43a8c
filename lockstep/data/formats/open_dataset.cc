// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "lockstep/base/names.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/calls/tensor_call.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/data/webdataset/shards.h"

namespace lockstep {
namespace {

// The text of --data, "KIND[:PATH][?KEY=VALUE&KEY=VALUE]", taken apart.
class Request {
 public:
  explicit Request(const DataSource& source)
      : whole_(source.data), augment_(source.augment), trained_on_(source.trained_on) {
    const size_t question = whole_.find('?');
    const std::string name = whole_.substr(0, question);
    const size_t colon = name.find(':');
    kind_ = name.substr(0, colon);
    path_ = colon == std::string::npos ? source.folder : name.substr(colon + 1);
    if (question == std::string::npos) return;
    for (const std::string& option : split(whole_.substr(question + 1), '&')) {
      const size_t equals = option.find('=');
      if (equals == std::string::npos) throw refuse(concat("'", option, "' is not KEY=VALUE"));
      options_[option.substr(0, equals)] = option.substr(equals + 1);
    }
  }

  const std::string& kind() const { return kind_; }
  const std::optional<DataFacts>& trained_on() const { return trained_on_; }
  std::string path(const std::string& otherwise = "") const {
    if (path_.empty() && otherwise.empty()) throw refuse("it needs a path");
    return path_.empty() ? otherwise : path_;
  }

  // The value of an option, which counts as used from then on.
  std::string text(const std::string& key, const std::string& otherwise) {
    const auto option = options_.extract(key);
    return option ? option.mapped() : otherwise;
  }
  double number(const std::string& key, double otherwise) {
    const std::string value = text(key, "");
    if (!value.empty() && !parse_number(value, otherwise)) throw refuse(concat(key, "=", value, " is not a number"));
    return otherwise;
  }
  int64_t whole(const std::string& key, int64_t otherwise) {
    return static_cast<int64_t>(number(key, to_double(otherwise)));
  }

  // The next two are called when all options were read.
  ImageTransforms transforms(const ImageTransforms& base, Split split) const {
    require_all_used();
    const ImageTransforms training = parse_transforms(augment_, base);
    return split == Split::kTrain ? training : without_augmentation(training);
  }
  void require_no_images() const {
    require_all_used();
    if (!augment_.empty())
      throw UsageError({.what = concat("--augment is for images, ", whole_, " has none"), .next = "leave it out"});
  }

  UsageError refuse(const std::string& why) const {
    return UsageError({.what = concat("--data ", whole_, ": ", why), .next = "see docs/data.md"});
  }

 private:
  void require_all_used() const {
    if (!options_.empty()) throw refuse(concat("it has no option ", options_.begin()->first));
  }

  std::string whole_;
  std::string augment_;
  std::optional<DataFacts> trained_on_;
  std::string kind_;
  std::string path_;
  std::map<std::string, std::string> options_;  // not used yet
};

// Cuts a dataset in two parts; `train` and `validation` have the same samples.
Datasets in_two_parts(DatasetPtr train, DatasetPtr validation, double share, const Request& request) {
  if (share < 0 || share >= 1) throw request.refuse("val= is a share below 1");
  const int64_t size = train->size();
  const auto held_out = static_cast<int64_t>(to_double(size) * share);
  if (held_out == 0) return {std::move(train), nullptr};
  return {std::make_shared<SubsetDataset>(std::move(train), 0, size - held_out),
          std::make_shared<SubsetDataset>(std::move(validation), size - held_out, size)};
}

Datasets in_two_parts(const ImageSourcePtr& source, const ImageTransforms& base, Request& request) {
  const double share = request.number("val", 0);
  return in_two_parts(std::make_shared<ImageDataset>(source, request.transforms(base, Split::kTrain)),
                      std::make_shared<ImageDataset>(source, request.transforms(base, Split::kValidation)), share,
                      request);
}

// FOLDER/train and FOLDER/val, or FOLDER alone.
template <class Open>
Datasets in_folders(const fs::path& folder, const Open& open) {
  if (!fs::is_directory(folder / "train")) return {open(folder, Split::kTrain), nullptr};
  Datasets both{open(folder / "train", Split::kTrain), nullptr};
  if (fs::is_directory(folder / "val")) both.validation = open(folder / "val", Split::kValidation);
  return both;
}

constexpr SplitImages kSplitImages[] = {
    {"fashion-mnist", read_mnist_files, FashionMNIST::normalised},
    {"mnist", read_mnist_files, [] { return ImageTransforms{.mean = {0.1307F}, .deviation = {0.3081F}}; }},
    {"cifar-10", read_cifar_files,
     [] {
       return ImageTransforms{.mean = {0.4914F, 0.4822F, 0.4465F}, .deviation = {0.2470F, 0.2435F, 0.2616F}};
     }},
    {"cifar-100", read_cifar_files, [] {
       return ImageTransforms{.mean = {0.5071F, 0.4865F, 0.4409F}, .deviation = {0.2673F, 0.2564F, 0.2762F}};
     }}};

Datasets both_splits(Request& request) {
  const SplitImages& images = split_images(request.kind());
  const std::string folder = request.path(request.kind() == "fashion-mnist" ? FashionMNIST::kDebianFolder : "");
  const auto open = [&](Split split) {
    const ImageTransforms transforms = request.transforms(images.normalised(), split);
    return std::make_shared<ImageDataset>(images.read(images.name, folder, split), transforms);
  };
  return {open(Split::kTrain), open(Split::kValidation)};
}

Datasets image_folder(Request& request) {
  DataFacts facts = request.trained_on().value_or(DataFacts());
  Datasets both = in_folders(request.path(), [&](const fs::path& folder, Split split) {
    const ImageTransforms transforms = request.transforms(photographs(), split);
    const auto source = std::make_shared<ImageFolder>(folder, facts.classes);
    facts.classes = source->class_names();  // validation takes those of the training images
    return std::make_shared<ImageDataset>(source, transforms);
  });
  both.facts = facts;
  return both;
}

Datasets webdataset(Request& request) {
  DataFacts facts;
  int64_t classes = 0;
  const auto open = [&](const fs::path& path, Split split) {
    const auto samples = std::make_shared<ShardReader>(path, classes);
    classes = samples->info().classes;  // validation has those of the training samples, too
    if (facts.classes.empty()) facts.classes = samples->info().class_names;
    const ShardSample& first = samples->first();
    const bool colour = first.encoded || (first.is_image() && first.shape[0] == 3);
    const ImageTransforms base = colour ? photographs() : ImageTransforms{.mean = {0.5F}, .deviation = {0.5F}};
    if (!first.is_image()) request.require_no_images();
    return dataset_of(samples, request.transforms(base, split));
  };
  const auto paths = split(request.path(), ',');
  const bool is_one = paths.size() != 2 || fs::exists(request.path());  // a folder may have a comma in its name
  Datasets both = is_one ? in_folders(request.path(), open)
                         : Datasets{open(paths[0], Split::kTrain), open(paths[1], Split::kValidation)};
  both.facts = facts;
  return both;
}

Datasets npy(Request& request) {
  const auto paths = split(request.path(), ',');
  if (paths.size() != 2) throw request.refuse("it is npy:DATA.npy,TARGETS.npy");
  const Tensor data = read_npy(paths[0]), target = read_npy(paths[1]);
  const std::string name = fs::path(paths[0]).filename();
  const auto images = images_in(name, data, target, request.whole("classes", 0), request.path());
  if (images) return in_two_parts(images, {}, request);
  const double share = request.number("val", 0);
  request.require_no_images();
  const auto rows = std::make_shared<TensorDataset>(name, data, target);
  return in_two_parts(rows, rows, share, request);
}

// By them the columns get mean 0 and deviation 1 over these rows; one that is always the same becomes 0.
void measure(DataFacts& facts, const Tensor& rows) {
  const Tensor known = rows.to(torch::kFloat64);
  const Tensor deviation = known.std(0, /*unbiased=*/false);
  facts.mean = numbers_in<double>(known.mean(0));
  facts.deviation = numbers_in<double>(deviation.where(deviation > 0, torch::ones_like(deviation)));
}

void normalise(const Tensor& data, const DataFacts& facts) {
  data.copy_((data - torch::tensor(facts.mean, torch::kFloat64)) / torch::tensor(facts.deviation, torch::kFloat64));
}

void require_columns(const Table& table, const DataFacts& known, const Request& request) {
  if (table.data.size(1) == std::ssize(known.mean) &&
      (known.columns.empty() || table.columns.empty() || table.columns == known.columns))
    return;
  throw DataError({.what = concat("the table's columns are ", join(table.columns, ", "), " (", table.data.size(1),
                                  "), in training they were ", join(known.columns, ", "), " (", known.mean.size(), ")"),
                   .here = request.path(),
                   .likely = "columns in another order, or a target that is not the last one: target=NAME"});
}

// The same in every run.
Tensor random_rows(int64_t count) {
  constexpr uint64_t kOrder = 0x726F7773;
  std::vector<int64_t> order(to_size(count));
  for (size_t i = 0; i < order.size(); ++i) order[i] = to_int64(permuted(i, order.size(), kOrder));
  return torch::tensor(order, torch::kInt64);
}

// Files are often sorted by class: rows are mixed before some are held out.
Datasets csv(Request& request) {
  const std::string separator = request.text("separator", ",");
  if (separator.size() != 1 && separator != "tab") throw request.refuse("separator= is one character, or tab");
  const bool normalised = request.whole("normalise", 1) != 0;
  const auto& known = request.trained_on();
  const double share = request.number("val", known ? 0 : 0.2);
  TableOptions options{.target = request.text("target", ""),
                       .numbers = request.whole("numbers", 0) != 0,
                       .separator = separator == "tab" ? '\t' : separator[0]};
  if (known) {
    options.classes = known->classes;
    options.inputs = std::ssize(known->mean);
  }
  request.require_no_images();
  Table table = read_csv(request.path(), options);
  if (known) require_columns(table, *known, request);
  if (!known) {
    const Tensor mixed = random_rows(table.data.size(0));
    table.data = table.data.index_select(0, mixed);
    table.target = table.target.index_select(0, mixed);
  }
  const auto rows = std::make_shared<TensorDataset>(fs::path(request.path()).filename(), table.data, table.target);
  Datasets both = in_two_parts(rows, rows, share, request);
  const auto columns = to_size(table.data.size(1));
  both.facts = known.value_or(DataFacts{.classes = table.classes,
                                        .columns = table.columns,
                                        .mean = std::vector<double>(columns, 0),
                                        .deviation = std::vector<double>(columns, 1)});
  if (!known && normalised) measure(both.facts, rows->data().slice(0, 0, both.train->size()));
  normalise(rows->data(), both.facts);
  return both;
}

Datasets text(Request& request) {
  TokenOptions options{.block = request.whole("block", 128),
                       .token_bytes = bytes_of_token(static_cast<int>(request.whole("bits", 8))),
                       .vocabulary = request.whole("vocabulary", 0)};
  const double share = request.number("val", 0);
  request.require_no_images();
  options.leave = share;
  auto train = std::make_shared<TokenDataset>(request.path(), options);
  if (share == 0) return {train, nullptr};
  options.skip = 1 - share;
  options.leave = 0;
  return {train, std::make_shared<TokenDataset>(request.path(), options)};
}

Datasets synthetic(Request& request) {
  const auto texts = split(request.path("1024x3x32x32"), 'x');
  std::array<int, 4> sizes{};
  for (size_t i = 0; i < sizes.size(); ++i)
    if (texts.size() != sizes.size() || !parse_number(texts[i], sizes[i]))
      throw request.refuse("it is synthetic:NxCxHxW");
  const auto [samples, channels, height, width] = sizes;
  const auto source = synthetic_images(samples, {channels, height, width}, request.whole("classes", 10));
  return in_two_parts(source, {.mean = {0.5F}, .deviation = {0.2F}}, request);
}

void write_synthetic(int64_t index, int64_t class_of_it, std::span<uint8_t> into) {
  constexpr uint64_t kPatterns = 0x7061747465726E73ULL;
  SampleRandom pattern(kPatterns, class_of_it);
  SampleRandom noise(mix_seed(0, 0), index);
  for (uint8_t& value : into) value = static_cast<uint8_t>((pattern() % 256 + noise() % 256) / 2);
}

// Every kind of dataset that --data knows. To add one, write a function that opens it and add a row; the command's help
// and the error for an unknown kind list the names from here, and docs/data.md describes them.
struct Kind {
  const char* name;
  Datasets (*open)(Request& request);
};
constexpr Kind kKinds[] = {{"fashion-mnist", both_splits},
                           {"mnist", both_splits},
                           {"cifar-10", both_splits},
                           {"cifar-100", both_splits},
                           {"imagefolder", image_folder},
                           {"webdataset", webdataset},
                           {"csv", csv},
                           {"npy", npy},
                           {"text", text},
                           {"synthetic", synthetic}};

}  // namespace

ImageTransforms photographs() { return {.mean = {0.485F, 0.456F, 0.406F}, .deviation = {0.229F, 0.224F, 0.225F}}; }

const SplitImages& split_images(const std::string& kind) { return row_named(kSplitImages, kind, "--data"); }

ImageSourcePtr images_in(const std::string& name, const Tensor& data, const Tensor& target, int64_t classes,
                         const std::string& origin) {
  if (data.scalar_type() != torch::kUInt8 || data.dim() < 3 || target.is_floating_point()) return nullptr;
  if (classes == 0) classes = target.numel() > 0 ? target.max().item<int64_t>() + 1 : 1;
  return std::make_shared<MemoryImages>(name, data, target, classes, origin);
}

ImageSourcePtr synthetic_images(int64_t samples, const ImageShape& shape, int64_t classes) {
  if (samples < 1 || classes < 1 || shape.channels < 1 || shape.height < 1 || shape.width < 1)
    throw UsageError({.what = concat("synthetic data of ", samples, " samples, ", shape.channels, " x ", shape.height,
                                     " x ", shape.width, " values, ", classes, " classes"),
                      .next = "give at least 1 of each"});
  const Tensor images = torch::empty({samples, shape.channels, shape.height, shape.width}, torch::kUInt8);
  auto* into = images.data_ptr<uint8_t>();
  for (int64_t i = 0; i < samples; ++i, into += shape.values())
    write_synthetic(i, i % classes, {into, to_size(shape.values())});
  return std::make_shared<MemoryImages>("synthetic", images, torch::arange(samples).remainder(classes), classes,
                                        "synthetic");
}

std::vector<std::string> dataset_kinds() { return names_in(kKinds); }

Datasets open_dataset(const DataSource& source) {
  Request request(source);
  return row_named(kKinds, request.kind(), "--data").open(request);
}

}  // namespace lockstep
