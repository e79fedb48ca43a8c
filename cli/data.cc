// SPDX-License-Identifier: Apache-2.0
// lockstep-data: `lockstep data pack` writes any dataset of --data as shards of WebDataset, `lockstep data info`
// describes shards.
#include <CLI/CLI.hpp>
#include <filesystem>

#include "lockstep/base/command_line.h"
#include "lockstep/base/text.h"
#include "lockstep/data/images/encoded_image.h"
#include "lockstep/data/webdataset/shards.h"
#include "lockstep/datasets.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

struct Arguments {
  DataSource source;
  std::string folder;
  double shard_mib = 256;
  PackOptions options;
};

std::string first_sample(const ShardReader& samples) {
  const ShardSample& first = samples.first();
  if (!first.encoded) return concat(c10::toString(first.dtype), " (", join(first.shape, ", "), ")");
  const ImageShape shape = encoded_shape(first.payload, samples.info().name);
  return concat(is_jpeg(first.payload) ? "JPEG" : "PNG", " of ", shape.width, " x ", shape.height, ", ",
                human_bytes(first.payload.size()));
}

void describe(const fs::path& folder) {
  const ShardReader samples(folder);
  const ShardInfo& info = samples.info();
  std::cout << folder.string() << '\n'
            << "  name         " << info.name << '\n'
            << "  samples      " << with_thousands(samples.size()) << '\n'
            << "  shards       " << samples.shard_sizes().size() << ", " << human_bytes(samples.bytes()) << '\n';
  if (info.classes > 0) std::cout << "  classes      " << info.classes << '\n';
  if (!info.class_names.empty()) std::cout << "  class names  " << join(info.class_names, ", ") << '\n';
  std::cout << "  a sample     " << first_sample(samples) << '\n';
}

// The folder itself, or its train and val.
int describe_parts(const fs::path& folder) {
  std::vector<fs::path> parts;
  for (const char* part : {"train", "val"})
    if (fs::is_directory(folder / part)) parts.push_back(folder / part);
  for (const fs::path& part : parts.empty() ? std::vector{folder} : parts) describe(part);
  return 0;
}

int pack_command(const Arguments& arguments) {
  PackOptions options = arguments.options;
  options.shard_bytes = static_cast<uint64_t>(arguments.shard_mib * 1024 * 1024);
  const Datasets data = open_dataset(arguments.source);
  const fs::path folder = arguments.folder;
  pack(*data.train, data.validation ? folder / "train" : folder, options);
  if (data.validation) pack(*data.validation, folder / "val", options);
  return describe_parts(folder);
}

void add_pack(CLI::App& app, Arguments& arguments) {
  CLI::App* pack = app.add_subcommand("pack", "writes a dataset as shards of WebDataset, with checksums");
  pack->add_option("--data", arguments.source.data, concat("KIND[:PATH][?OPTIONS]: ", join(dataset_kinds(), ", ")))
      ->required();
  pack->add_option("--data-dir", arguments.source.folder, "folder that holds the dataset");
  pack->add_option("--to", arguments.folder, "folder to write; with validation data, its subfolders train and val")
      ->required();
  pack->add_option("--shard-mib", arguments.shard_mib, "size of a shard")->check(CLI::Range(0.001, 1e6));
  pack->add_flag("--keep-order", arguments.options.keep_order, "do not shuffle the samples");
}

void add_info(CLI::App& app, Arguments& arguments) {
  CLI::App* info = app.add_subcommand("info", "describes shards of WebDataset");
  info->add_option("folder", arguments.folder, "a folder of *.tar, one of them, or NAME-{000..012}.tar")->required();
}

int run(int argc, char** argv) {
  CLI::App app("Packs datasets and describes them", "lockstep data");
  app.option_defaults()->always_capture_default();
  Arguments arguments;
  add_pack(app, arguments);
  add_info(app, arguments);
  app.require_subcommand(1);
  return parse_and_run(app, argc, argv, [&] {
    return app.got_subcommand("pack") ? pack_command(arguments) : describe_parts(arguments.folder);
  });
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::run(argc, argv); }
